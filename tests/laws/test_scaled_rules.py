"""Law: every operator on scaled tensors gives plain numbers, falls back nowhere unlisted, and alike in every grad mode.

A random choice of torch's own table (op_db) each time; bench_op_coverage and bench_grad_modes run all entries."""

import random

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map

from halfulp.scaled import ScaledTensor

ENTRIES, SAMPLES = 40, 4


@pytest.fixture
def coverage(benchmark_module):
    return benchmark_module("bench_op_coverage")


@pytest.mark.filterwarnings("ignore")
def test_a_choice_of_entries_computes_right(coverage, seed):
    chosen = random.Random(seed).sample(coverage.operators(), ENTRIES)
    entries = [coverage.examined(op, most=SAMPLES) for op in chosen]
    wrong = [entry for entry in entries if entry.problem and entry.name not in coverage.KNOWN]
    assert not wrong, "\n".join(f"{entry.name}: {entry.problem}" for entry in wrong)
    fallbacks = {entry.name: entry.fallbacks for entry in entries if entry.fallbacks}
    assert fallbacks.keys() <= coverage.KNOWN.keys(), fallbacks


@pytest.fixture
def modes(benchmark_module):
    return benchmark_module("bench_grad_modes")


@pytest.mark.filterwarnings("ignore")
def test_a_choice_of_operators_gives_the_same_numbers_in_every_mode(modes, seed):
    chance = random.Random(seed)
    for op in chance.sample(modes.operators(), 15):
        entry = modes.examined(op, most=1, kinds=[chance.choice(modes.KINDS)])
        assert not entry.problem or entry.name in modes.KNOWN, f"{entry.name}: {entry.problem}"


def scaled(sample, home):
    """A sample's floating tensors as float16 payloads."""

    def entered(x):
        if not isinstance(x, torch.Tensor) or x.dtype != torch.float32 or x.layout != torch.strided:
            return x
        return ScaledTensor.encode(x.detach(), home=home).detach().requires_grad_(x.requires_grad)

    return tree_map(entered, (sample.input, list(sample.args), dict(sample.kwargs)))


def plain(x):
    return x.detach().decode().requires_grad_(x.requires_grad) if isinstance(x, ScaledTensor) else x


def computed(op, given):
    """All results and gradients of what may have some; None for an operator that refuses the sample."""
    torch.manual_seed(1)
    first, others, options = given
    try:
        results = [y for y in tree_leaves(op.op(first, *others, **options)) if isinstance(y, torch.Tensor)]
        leaves = [x for x in tree_leaves(given) if isinstance(x, torch.Tensor) and x.requires_grad]
        real = [y for y in results if y.requires_grad and y.is_floating_point()]
        if real and leaves:
            results += torch.autograd.grad(sum(y.sum() for y in real), leaves, allow_unused=True)
    except (NotImplementedError, RuntimeError, ValueError):
        return None
    return results


def error(x, y) -> float:
    """The relative distance of finite values; infinite where others are finite."""
    if x is None or y is None or not y.is_floating_point():
        return 0.0
    x, y = (z.detach().decode() if isinstance(z, ScaledTensor) else z.detach() for z in (x, y))
    kept = y.isfinite()
    if x.dtype.is_complex or bool((x.isfinite() != kept).any()):
        return float("inf")
    return ((x[kept] - y[kept]).norm() / y[kept].norm().clamp(min=1e-30)).item()


@pytest.mark.filterwarnings("ignore")
def test_a_choice_of_entries_has_the_home_and_is_no_worse_than_without(coverage, seed):
    apart = {*coverage.KNOWN, *coverage.RANDOM, *coverage.UNINITIALISED}
    kept = [op for op in coverage.operators() if not {op.name, coverage.name_of(op)} & apart]
    for op in random.Random(seed).sample(kept, 12):
        torch.manual_seed(0)  # samples that all entries were seen to hold for
        samples = list(op.sample_inputs("cpu", torch.float32, requires_grad=True))[:1]
        for sample in samples:
            with_home = computed(op, scaled(sample, torch.float16))
            without = computed(op, scaled(sample, None))
            exact = computed(op, tree_map(plain, scaled(sample, None)))
            assert (with_home is None) == (without is None), coverage.name_of(op)
            for y, other, wanted in zip(with_home or [], without or [], exact or []):
                if isinstance(y, ScaledTensor):
                    assert y.home == torch.float16, coverage.name_of(op)
                    assert y.payload.dtype in (torch.float16, torch.float32), coverage.name_of(op)
                assert error(y, wanted) <= 1.5 * error(other, wanted) + 2e-3, coverage.name_of(op)
