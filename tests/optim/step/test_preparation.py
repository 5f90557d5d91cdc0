"""Sums that a rule needs before its update: exact up to their bound, the same bits however they are added up."""

import dataclasses
import math

import pytest
import torch

import halfulp as hu
from halfulp.kernels import CHUNK_ELEMENTS
from halfulp.optim.step._run import compile_kernels, compute_rule_sums


def _weight(w):
    return w


def _gradient(w, g):
    return g


def _product(w, g, m, v, sign):
    return sign * w * g


def _sums(parameters, reductions, engine, **options):
    """What reductions give for parameters and their gradients."""

    class Reducing(hu.optim.AdamW):
        def rule(self, group):
            own = {"reductions": reductions, "late_values": lambda group, step, sums: ()}
            return dataclasses.replace(super().rule(group), name="reducing", **own)

    optimizer = Reducing(parameters, report_interval=0, **options)
    with hu.kernels.engine(engine):
        batches, _ = optimizer._collect_batches()
        for batch in batches:
            compile_kernels(batch)
        found = compute_rule_sums(batches)
    return [total for batch in found for total in batch]


def _problem(seed, shapes=((7, 5), (2 * CHUNK_ELEMENTS + 3,), ())):
    generator = torch.Generator().manual_seed(seed)
    parameters = []
    for shape in shapes:
        exponent = torch.empty(shape).uniform_(-30, 30, generator=generator)
        parameters.append(torch.nn.Parameter(torch.randn(shape, generator=generator) * torch.exp2(exponent)))
        parameters[-1].grad = torch.randn(shape, generator=generator)
    return parameters


@pytest.mark.parametrize("engine", ["llvm", "reference"])
def test_a_sum_is_fsums_up_to_its_bound(seed, engine):
    parameters = _problem(seed)
    squares, products = hu.optim.Reduction(_weight, squares=True), hu.optim.Reduction(_product)
    for parameter, (square, product) in zip(parameters, _sums(parameters, (squares, products), engine)):
        w = parameter.detach().double().flatten()
        terms = (parameter.detach() * parameter.grad).double().flatten()
        n = max(w.numel(), 2)
        for found, given in ((square, w * w), (product, terms)):
            bound = n**3 * 2.0**-104 * given.abs().max().item()
            assert abs(found - math.fsum(given.tolist())) <= bound + 2**-52 * abs(found)


def test_every_engine_order_and_size_of_chunks_gives_the_same_bits(seed):
    parameters = _problem(seed)
    reductions = hu.optim.Reduction(_gradient, squares=True), hu.optim.Reduction(_product, over_all=True)
    found = _sums(parameters, reductions, "llvm")
    assert found == _sums(parameters, reductions, "reference")
    assert len({product for _, product in found}) == 1
    shuffled = []
    for parameter in parameters[::-1]:
        order = torch.randperm(parameter.numel(), generator=torch.Generator().manual_seed(seed))
        shuffled.append(torch.nn.Parameter(parameter.detach().flatten()[order]))
        shuffled[-1].grad = parameter.grad.flatten()[order]
    assert found == _sums(shuffled, reductions, "llvm")[::-1]


@pytest.mark.parametrize("scale", [2.0**-120, 1.0, 2.0**126])
def test_sums_of_small_and_large_values(scale):
    parameter = torch.nn.Parameter(torch.tensor([1.0, -3.0, 0.0]) * scale)
    parameter.grad = torch.zeros(3)
    ((square, value),) = _sums(
        [parameter], (hu.optim.Reduction(_weight, squares=True), hu.optim.Reduction(_weight)), "llvm"
    )
    assert (square, value) == (10 * scale * scale, -2 * scale)


def test_what_is_not_finite_shows_in_its_own_sum():
    parameters = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    for parameter in parameters:
        parameter.grad = torch.ones(3)
    parameters[0].grad[1] = torch.nan
    (first,), (second,) = _sums(parameters, (hu.optim.Reduction(_gradient),), "llvm")
    assert math.isnan(first)
    assert second == 3


def test_scaled_and_multicomponent_parameters_have_their_values_norms(seed):
    values = torch.randn(64, generator=torch.Generator().manual_seed(seed)).bfloat16().float()
    norm = (hu.optim.Reduction(_weight, squares=True),)
    ((plain,),) = _sums(_with_gradient(torch.nn.Parameter(values.clone())), norm, "llvm")
    scaled = torch.nn.Parameter(hu.ScaledTensor.encode(values, dtype=torch.bfloat16))
    parts = torch.nn.Parameter(hu.MCTensor.encode(values, 2, dtype=torch.bfloat16))
    for parameter in (scaled, parts):
        for engine in ("llvm", "reference"):
            assert _sums(_with_gradient(parameter), norm, engine) == [(plain,)]


def _with_gradient(parameter):
    parameter.grad = torch.zeros_like(parameter)
    return [parameter]


def test_more_than_two_reductions_are_refused():
    with pytest.raises(ValueError, match="at most two"):
        dataclasses.replace(
            hu.optim.LAMB([torch.nn.Parameter(torch.ones(1))]).rule({}),
            reductions=(hu.optim.Reduction(_weight),) * 3,
        )


ON_TWO = """
import sys, warnings
from datetime import timedelta
import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
import halfulp as hu

warnings.filterwarnings("ignore", "DTensor random operators may not")  # torch 2.6
rank, path, seed = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
dist.init_process_group("gloo", init_method="file://" + path, rank=rank, world_size=2, timeout=timedelta(seconds=60))
mesh = init_device_mesh("cpu", (2,))
shapes = [(5, 6), (1, 3), (7,), (4, 4)]
placements = [[Shard(0)], [Shard(0)], [Shard(0)], [Replicate()]]


def trained(make, wrap, shapes=shapes):
    generator = torch.Generator().manual_seed(seed)
    numbers = lambda shape: torch.randn(shape, generator=generator)
    held = [(f"w{k}", torch.nn.Parameter(wrap(numbers(s), k))) for k, s in enumerate(shapes)]
    optimizer = make(held)
    for _ in range(4):
        for k, (_, p) in enumerate(held):
            p.grad = wrap(numbers(p.shape), k).to(p.dtype)
        optimizer.step()
    return [p.detach() for _, p in held]


def check(make, shapes=shapes):
    whole = trained(make, lambda tensor, k: tensor, shapes)
    shared = trained(make, lambda tensor, k: distribute_tensor(tensor, mesh, placements[k]), shapes)
    for one, other in zip(whole, shared):
        assert torch.equal(one, other.full_tensor()), (one, other.full_tensor())


{CHECKS}
dist.destroy_process_group()
"""


def test_shards_step_as_the_whole(in_two_processes):
    checks = """
for update in ("split8", "kahan"):
    check(lambda held: hu.optim.LAMB(held, lr=0.1, param_dtype=torch.bfloat16, weight_update=update))
check(lambda held: hu.optim.LAMB(held, lr=0.1, weight_decay=0.1))
matrices = [(5, 6), (1, 3), (7, 2), (4, 4)]
for make in (hu.optim.Adafactor, hu.optim.Muon):
    check(lambda held: make(held, lr=0.1, param_dtype=torch.bfloat16), matrices)
check(lambda held: hu.optim.Adafactor(held, lr=0.1, weight_decay=0.1))
check(lambda held: hu.optim.Prodigy(held, weight_decay=0.1, param_dtype=torch.bfloat16, weight_update="kahan"))
"""
    in_two_processes(ON_TWO.replace("{CHECKS}", checks))


@pytest.mark.parametrize("has_products", [True, False])
@pytest.mark.parametrize("kind", ["Adafactor", "Muon"])
def test_a_step_under_autocast_has_its_own_bits(kind, has_products, seed, monkeypatch):
    """Also Muon's on a processor without products of bfloat16, which are float32."""
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: has_products)
    made = []
    for enabled in (False, True):
        generator = torch.Generator().manual_seed(seed)
        w = torch.nn.Parameter(torch.randn(24, 16, generator=generator))
        optimizer = getattr(hu.optim, kind)([w], lr=0.01)
        for _ in range(3):
            w.grad = torch.randn(24, 16, generator=generator)
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                optimizer.step()
        made.append(w.detach())
    assert torch.equal(*made)
