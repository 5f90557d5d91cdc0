"""Law: on an accelerator, scaled tensors wait for no number of the device, and copy none from the host."""

import contextlib
import random

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map

from halfulp.environment._narrow_products import force_float32_products
from halfulp.kernels import same_bits
from halfulp.scaled import ScaledTensor

from ..samples import drawn

STORAGES = ("float32", "bfloat16", "float16", "fp8 products")
# Launches of a forward and a backward pass with kernels, as a multiple of the plain model's.
MOST = {"float32": 4.0, "bfloat16": 5.0, "float16": 5.0, "fp8 products": 8.0}
ENTRIES = 30


@pytest.fixture
def launches(benchmark_module):
    return benchmark_module("_gpu._launches")


def total(counts, parts):
    return sum(sum(counts[part].launches.values()) for part in parts)


STEPS = [(storage, True) for storage in drawn(STORAGES, 2, "kernels")]
STEPS += [(storage, False) for storage in drawn(STORAGES, 1, "launches")]


@pytest.fixture(scope="module")
def counts_of_plain_tensors():
    """Of the same model, by part, when somebody has asked."""
    return {}


@pytest.mark.parametrize(("storage", "with_kernels"), STEPS)
def test_a_training_step_waits_for_nothing(launches, storage, with_kernels, counts_of_plain_tensors):
    plain = counts_of_plain_tensors or launches.counted("plain")
    counts_of_plain_tensors.update(plain)
    with force_float32_products():  # none, as on a device: products in float32 are more launches
        scaled = launches.counted(storage, with_kernels)
    waits = {part: counts.synchronisations for part, counts in scaled.items()}
    asked = [counts for part, counts in waits.items() if part != "torch's AdamW"]
    assert not any(asked), waits
    # torch's own step counts lie on the CPU.
    assert sum(waits["torch's AdamW"].values()) == sum(plain["torch's AdamW"].synchronisations.values())
    if with_kernels:
        passes = ("forward", "backward")
        assert total(scaled, passes) <= MOST[storage] * total(plain, passes)


@pytest.mark.filterwarnings("ignore")
def test_a_choice_of_operators_waits_for_nothing(launches, benchmark_module, seed):
    chance = random.Random(seed)
    wrong = []
    for op in chance.sample(benchmark_module("bench_op_coverage").operators(), ENTRIES):
        samples = list(op.sample_inputs("cpu", torch.float32, requires_grad=False))
        sample = chance.choice(samples)
        given = sample.input, list(sample.args), dict(sample.kwargs)
        scaled = tree_map(_scaled, given)
        if not any(isinstance(x, ScaledTensor) for x in tree_leaves(scaled)):
            continue
        with launches.counting(with_kernels=chance.random() < 0.5) as found:
            if not _runs(op, scaled):
                continue
        with launches.counting() as own:
            op.op(given[0], *given[1], **given[2])
        if sum(found.synchronisations.values()) > sum(own.synchronisations.values()):
            wrong.append((op.name, found.synchronisations))
    assert not wrong


def _scaled(x):
    is_encoded = isinstance(x, torch.Tensor) and x.dtype == torch.float32 and x.layout == torch.strided
    return ScaledTensor.encode(x.detach()) if is_encoded else x


def _runs(op, given) -> bool:
    try:
        op.op(given[0], *given[1], **given[2])
    except (NotImplementedError, RuntimeError, ValueError):  # what it refuses
        return False
    return True


@pytest.mark.parametrize("storage", drawn(STORAGES, 2, "bits"))
def test_kernels_leave_every_bit_of_a_training_step(launches, storage):
    found = []
    for fused in (False, True):
        with launches.blind(), launches.fused_kernels() if fused else contextlib.nullcontext():
            parts = launches.training(storage)
            for part in ("forward", "backward", "clipping", "torch's AdamW", "clear", "forward", "backward"):
                parts[part]()
        found.append([x for p in parts.model.parameters() for x in _parts(p)])
    assert all(map(same_bits, *found))


def _parts(p):
    return p._payload.detach(), p._scale, p.grad._payload, p.grad._scale


def test_the_counter_sees_what_waits(launches):
    x, mask = torch.randn(4), torch.tensor([True, False, True, False])
    waiting = {
        "a number read": lambda: x.sum().item(),
        "a number copied": lambda: torch.tensor(1.0),
        "a mask as an index": lambda: x[mask],
        "a constant read": lambda: x.masked_fill(mask, torch.zeros(())),
    }
    for name, run in waiting.items():
        with torch.no_grad(), launches.counting() as counts:
            run()
        assert sum(counts.synchronisations.values()) == 1, name
    with torch.no_grad(), launches.counting() as counts:
        torch.where(mask, x, 0.0).view(2, 2).to(torch.float16)
    assert not counts.synchronisations
    assert sum(counts.launches.values()) == 3
