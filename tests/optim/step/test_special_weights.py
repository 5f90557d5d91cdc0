"""Infinite and NaN weights beside foreign companions: the same in the kernel and its reference, and the right ones."""

import itertools

import pytest
import torch

import halfulp as hu
from halfulp.kernels import same_bits
from halfulp.optim.parameters._outside_writes import record_payload_version

ENGINES = ["reference", "llvm"]
INF, NAN = float("inf"), float("nan")
WEIGHTS, GRADIENTS = (INF, -INF, NAN, 1.0, 0.0, -0.0, 3.3e38), (0.0, -0.0, 2.0**-9, INF, -INF, NAN)
COMPANIONS = (0.0, -0.0, 2.0**-10, INF, -INF, NAN, 1e38)
COMPENSATED = {
    "kahan": "kahan",
    "kahan-stochastic": "kahan-stochastic",
    "kahan-nearest": hu.Kahan(residual="nearest"),
    "kahan-literal": hu.Kahan(literal=True),
    "components-3": hu.Components(3),
    "components-3-stochastic": hu.Components(3, "stochastic"),
    "components-4": hu.Components(4),
    "master": "master",
}


def _stepped(engine, update, dtype, count):
    """All combinations of weights, companions and gradients, stepped once: weights before, tensors after."""
    rows = torch.tensor(list(itertools.product(WEIGHTS, *[COMPANIONS] * count, GRADIENTS)))
    with hu.kernels.engine(engine):
        p = torch.nn.Parameter(torch.zeros(len(rows), dtype=dtype))
        optimizer = hu.optim.SGD([p], lr=1.0, weight_update=update)
        p.grad = torch.zeros_like(p)
        optimizer.step()
        plan = optimizer._plans[p]
        for part, column in zip(plan.weight_tensors, rows.T):
            part.copy_(column)
        record_payload_version(plan)
        read = plan.spec.update.read(plan.spec.store, plan.weight_tensors).clone()
        p.grad = -rows[:, -1].to(dtype)
        optimizer.step()
    return rows, read, [part.clone() for part in plan.weight_tensors]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", COMPENSATED)
def test_both_engines_give_the_same_bits_whatever_stands_beside_a_weight(name, dtype):
    count = {"components-3": 2, "components-3-stochastic": 2, "components-4": 3}.get(name, 1)
    (_, read, ours), (_, other, theirs) = (_stepped(engine, COMPENSATED[name], dtype, count) for engine in ENGINES)
    assert same_bits(read, other)
    assert all(same_bits(*pair) for pair in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ["kahan", "components-3-stochastic"])
def test_a_foreign_residual_beside_an_infinite_weight_counts_as_nothing(name, engine):
    """The parameter was written since: it has the last word, and stays infinite under finite updates."""
    rows, _, (weight, *_) = _stepped(engine, COMPENSATED[name], torch.bfloat16, 2 if name != "kahan" else 1)
    # A first component that is no number beside the weight cannot be its own; what stands behind goes with it.
    foreign = rows[:, 0].isinf() & ~rows[:, 1].isfinite() & rows[:, -1].isfinite()
    assert foreign.any()
    assert torch.equal(weight[foreign].float(), rows[foreign, 0])


@pytest.mark.parametrize("engine", ENGINES)
def test_an_infinite_master_copy_stays_beside_a_format_without_infinities(engine):
    """Its nearest value there is NaN, which the parameter shows."""
    values = torch.tensor([INF, -INF, 1.0, -2.0]).repeat(8)
    with hu.kernels.engine(engine):
        p = torch.nn.Parameter(hu.ScaledTensor.encode(torch.ones(32), torch.float8_e4m3fn))
        optimizer = hu.optim.SGD([p], lr=1.0, weight_update="master")
        for gradient in (1.0 - values, torch.zeros(32), torch.full((32,), 2.0**-6)):
            p.grad = hu.ScaledTensor.encode(gradient, torch.float32)
            optimizer.step()
        master = optimizer.state[p]["master"]
    assert torch.equal(master.isinf(), values.isinf())
    assert torch.equal(master.sign(), values.sign())
    assert torch.equal(p.payload.float().isnan(), values.isinf())


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ["split8", "split", "split-stochastic", "kahan", "master", "stochastic"])
def test_a_nan_of_all_ones_stays_one(name, engine, seed):
    """torch.maximum makes such of a running maximum: the random bits that a weight is rounded by carry it to zero."""
    p = torch.nn.Parameter(torch.randn(8, 32).bfloat16())
    with hu.kernels.engine(engine):
        optimizer = hu.optim.AdamW([p], amsgrad=True, weight_update=name)
        for _ in range(3):
            p.grad = torch.randn_like(p)
            optimizer.step()
            optimizer.state[p]["max_exp_avg_sq"][::2] = NAN
    assert p[::2].isnan().all()
    assert p[1::2].isfinite().all()
