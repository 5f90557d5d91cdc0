"""The precision contract holds for what it was made of, names every difference, and travels in any checkpoint."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import halfulp as hu
from halfulp.recipes import Contract


def stepped(model, optimizer):
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return model, optimizer


def plain():
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    return stepped(model, torch.optim.AdamW(model.parameters()))


def kahan():
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3)).bfloat16()
    return stepped(model, hu.optim.AdamW(model.named_parameters(), weight_update="kahan"))


def scaled():
    model = hu.scalify(torch.nn.Linear(4, 3), dtype=torch.float16)
    return model, hu.optim.AdamW(model.named_parameters())


def components():
    model = hu.multicomponent(torch.nn.Linear(4, 3), 2, torch.bfloat16)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


KINDS = [plain, kahan, scaled, components]


@pytest.mark.parametrize("make", KINDS)
def test_it_holds_for_its_own_run_after_every_way_of_saving(make, tmp_path):
    model, optimizer = make()
    held = hu.contract(model, optimizer)
    held.check(model, optimizer)
    held.check(model)
    assert Contract.from_dict(json.loads(json.dumps(held.to_dict()))) == held
    torch.save({"w": torch.ones(1), "precision_contract": held.to_dict()}, tmp_path / "a.pt")
    assert Contract.from_dict(torch.load(tmp_path / "a.pt", weights_only=True)) == held
    save_file({"w": torch.ones(1)}, tmp_path / "a.safetensors", metadata=held.metadata())
    with safe_open(tmp_path / "a.safetensors", "pt") as file:
        assert Contract.from_dict(file.metadata()) == held


def test_it_says_how_each_kind_is_held():
    assert hu.contract(*plain()).tensors["0.weight"].states == {"exp_avg": "float32", "exp_avg_sq": "float32"}
    terms = hu.contract(*kahan()).tensors["0.weight"]
    assert (terms.dtype, terms.weight_update, terms.states["residual"]) == ("bfloat16", "kahan", "bfloat16")
    assert hu.contract(*kahan()).tensors["1.running_mean"].weight_update is None
    assert hu.contract(*scaled()).tensors["weight"].scale == "per tensor"
    assert hu.contract(*components()).tensors["weight"].storage == "2 x bfloat16"


@pytest.mark.parametrize("before", KINDS)
@pytest.mark.parametrize("after", KINDS)
def test_every_other_kind_is_refused_by_name(before, after):
    held, (model, optimizer) = hu.contract(*before()), after()
    if before is after:
        return held.check(model, optimizer)
    with pytest.raises(ValueError, match=r"does not hold: (0\.)?weight: .* allow it: allow="):
        held.check(model, optimizer)
    return held.check(model, optimizer, allow="*")


def test_an_optimizer_is_read_and_not_changed():
    model = torch.nn.Linear(4, 3).bfloat16()
    optimizer = hu.optim.AdamW(model.parameters(), weight_update="kahan")
    held = hu.contract(model, optimizer)
    assert not optimizer.state
    assert held.tensors["weight"].states == {}
    held.check(*stepped(model, optimizer))


def test_what_is_allowed_may_differ_and_nothing_else():
    held, (model, _) = hu.contract(*kahan()), kahan()
    other = hu.optim.AdamW(model.named_parameters(), weight_update="stochastic")
    with pytest.raises(ValueError, match=r"0\.weight: weight_update was kahan, is stochastic"):
        held.check(model, other)
    held.check(model, other, allow=["*:weight_update", "*:states"])
    held.check(model)
    with pytest.raises(ValueError, match="does not hold"):
        held.check(model, other, allow=["0.*"])
    for typo in ("head.*", "*:type"):
        with pytest.raises(ValueError, match="does not hold"):
            held.check(model, other, allow=[typo])
    with pytest.raises(ValueError, match=r"dtype was bfloat16, is float32"):
        held.check(model.float())


def test_what_is_no_contract_model_or_optimizer_is_refused():
    model, optimizer = plain()
    for given in ({}, {"precision_contract": "{"}, [1], {"version": 99}, {"version": 1, "tensors": {"w": {"x": 1}}}):
        with pytest.raises(ValueError, match="precision contract"):
            Contract.from_dict(given)
    with pytest.raises(TypeError, match=r"give a torch\.nn\.Module"):
        hu.contract(model.state_dict(), optimizer)
    with pytest.raises(TypeError, match="give a torch optimizer"):
        hu.contract(model, "adam")


def test_it_is_the_same_for_a_sharded_run(in_process):
    """In a process of its own, since a process group is one for all."""
    in_process(
        """
import warnings
warnings.resetwarnings()
import os, tempfile, torch, torch.distributed as dist, halfulp as hu
from torch.distributed.fsdp import fully_shard
dist.init_process_group("gloo", init_method="file://" + tempfile.mktemp(), rank=0, world_size=1)
mesh = dist.init_device_mesh("cpu", (1,))
def run(shard):
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.LayerNorm(3)).bfloat16()
    model = fully_shard(model, mesh=mesh) if shard else model
    optimizer = hu.optim.AdamW(model.named_parameters(), weight_update="kahan")
    model(torch.ones(2, 4).bfloat16()).sum().backward()
    optimizer.step()
    return model, optimizer
held = hu.contract(*run(False))
sharded = hu.contract(*run(True))
assert held == sharded, (held, sharded)
held.check(*run(True))
dist.destroy_process_group()
"""
    )


class Accelerated(torch.optim.Optimizer):
    """As accelerate wraps an optimizer: one itself, which hides the other's class."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.accelerator_state = optimizer, object()

    @property
    def param_groups(self) -> list:
        return self.optimizer.param_groups


def test_a_trainers_wrapper_is_looked_through():
    model = torch.nn.Linear(4, 2).bfloat16()
    optimizer = hu.optim.AdamW(model.named_parameters(), lr=0.1, weight_update="kahan")
    assert hu.contract(model, Accelerated(optimizer)) == hu.contract(model, optimizer)
    hu.contract(model, optimizer).check(model, Accelerated(optimizer))


def test_complex_buffers_have_terms(seed):
    model = torch.nn.Linear(3, 3)
    model.register_buffer("rotary", torch.ones(4, dtype=torch.complex64))
    held = hu.contract(model)
    model.rotary = model.rotary.to(torch.complex128)
    with pytest.raises(ValueError, match="rotary: dtype was complex64, is complex128"):
        held.check(model)


def test_optimizers_of_other_models_are_refused(seed):
    model = torch.nn.Linear(3, 3)
    with pytest.raises(ValueError, match="holds none of the parameters of this Linear: give the one that trains it"):
        hu.contract(model, torch.optim.SGD(torch.nn.Linear(3, 3).parameters()))
