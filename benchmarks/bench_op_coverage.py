"""How many of torch's own operator entries compute right on scaled tensors: `python -m benchmarks.bench_op_coverage`.

Every float32 entry of torch.testing's op_db that is neither sparse nor jiterator, on all of its sample inputs, each
floating tensor as a ScaledTensor of a float32 payload under a random power of two: results and gradients against the
plain operator's, and which operators ran on plain tensors for want of a rule.
"""

import argparse
import contextlib
import random
import sys
import time
import types
import unittest
import unittest.mock
import warnings
from collections import Counter
from dataclasses import asdict, dataclass, field

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from halfulp.scaled import ScaledTensor
from halfulp.subclass import record_fallbacks

from ._results import Result, Table, save

RTOL, ATOL = 1e-4, 1e-5  # of float32; the second where values cancel, relative to the largest element above 1
EXPONENTS = (-12, 12)
# What an uninitialised tensor holds is nobody's business: shape and dtype are compared.
UNINITIALISED = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted")
# These draw from torch's generator in an order that rules need not keep: where the values differ under one seed, the
# share of elements within tolerance says nothing, and shape, finiteness and root mean square are compared instead.
RANDOM = (
    *("bernoulli", "cauchy", "exponential", "geometric", "log_normal", "normal", "uniform", "multinomial", "rand_like"),
    *("randint", "randint_like", "randn", "randn_like", "nn.functional.dropout", "nn.functional.dropout2d"),
    *("nn.functional.dropout3d", "nn.functional.alpha_dropout", "nn.functional.feature_alpha_dropout"),
    *("nn.functional.rrelu", "nn.functional.fractional_max_pool2d", "nn.functional.fractional_max_pool3d"),
    *("nn.functional.scaled_dot_product_attention", "nn.functional.multi_head_attention_forward"),
    *("pca_lowrank", "svd_lowrank"),
)

# What is refused, falls back or differs, and why; anything else is a defect.
KNOWN = {
    "resize_": "refused: it changes how much memory a payload has; make a new tensor",
    "resize_as_": "refused, as resize_",
    "masked.prod": "torch's formula for tensor subclasses: a factor that is infinite or NaN has the gradient that the "
    "other factors give, where the plain formula divides by it",
    "nn.functional.linear_cross_entropy.chunked": "torch's own fused loss runs on plain tensors, counted",
    "nn.functional.linear_cross_entropy.chunked_none": "the same",
}


@dataclass
class Entry:
    """What one operator of op_db did on its samples."""

    name: str
    samples: int = 0
    forward: bool | None = None  # None: no sample has a floating input
    backward: bool | None = None  # None: not differentiable
    fallbacks: dict[str, int] = field(default_factory=dict)
    plain_results: bool = False
    problem: str = ""


def operators() -> list:
    """The float32 entries that are neither sparse nor jiterator."""
    # op_db imports expecttest for torch's own tests of printed text, which nothing here runs.
    if "expecttest" not in sys.modules:
        stub = types.ModuleType("expecttest")
        stub.TestCase = unittest.TestCase
        sys.modules["expecttest"] = stub
    # torch's tests forbid everyone in the process to set flags of its backends.
    kept_free = unittest.mock.patch.object(torch.backends, "disable_global_flags")
    with warnings.catch_warnings(), kept_free:
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    kept = [op for op in op_db if torch.float32 in op.supported_dtypes("cpu")]
    return [op for op in kept if "sparse" not in op.name and "jiterator" not in op.name]


def name_of(op) -> str:
    """An entry's name with its variant."""
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


def examined(op, seed: int = 0, most: int | None = None) -> Entry:
    """One entry on its samples, or on so many of them; the seed decides samples and scales."""
    entry = Entry(name_of(op))
    torch.manual_seed(seed)
    chance = random.Random(f"{seed} {entry.name}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        samples = samples_of(op, most, chance)
        with record_fallbacks() as counts:
            for number, sample in samples:
                if not _examine(op, sample, entry, chance, seed + number):
                    break
        entry.fallbacks = dict(counts)
    return entry


def samples_of(
    op, most: int | None, chance: random.Random, dtype: torch.dtype = torch.float32
) -> list[tuple[int, object]]:
    """What torch calls the operator with in its own tests, numbered: all, or a choice, and no more held at a time."""
    from torch.testing._internal import common_utils
    from torch.testing._internal.opinfo import core

    kept: list[tuple[int, object]] = []
    # torch would look through the whole stack, sources included, for a unittest that asks.
    with contextlib.ExitStack() as stack:
        for module in (common_utils, core):
            stack.enter_context(unittest.mock.patch.object(module, "extract_test_fn", return_value=None))
        for found in enumerate(op.sample_inputs("cpu", dtype, requires_grad=False)):
            if most is None or len(kept) < most:
                kept.append(found)
            elif (place := chance.randrange(found[0] + 1)) < most:
                kept[place] = found
    return kept


def _examine(op, sample, entry: Entry, chance: random.Random, seed: int) -> bool:
    """One sample; False ends the entry, as it is wrong already."""
    given = (sample.input, *sample.args), sample.kwargs
    if not any(_floating(x) for x in tree_leaves(given)):
        return True
    try:
        plain, leaves = run_on(op, given, seed, lambda x: x.detach().clone())
    except Exception:  # a sample that torch itself refuses says nothing
        return True
    entry.samples += 1
    entry.forward = True if entry.forward is None else entry.forward
    try:
        scaled, scaled_leaves = run_on(op, given, seed, lambda x: represented(x.detach(), chance))
        why = _differs(entry, plain, scaled)
    except Exception as error:
        why = f"{type(error).__name__}: {str(error)[:200]}"
    if why:
        entry.forward, entry.problem = False, f"forward: {why}"
        entry.backward = False if op.supports_autograd else None
        return False
    entry.plain_results |= any(
        _floating(x) and not isinstance(y, ScaledTensor) for x, y in zip(tree_leaves(plain), tree_leaves(scaled))
    )
    if not op.supports_autograd:
        return True
    try:
        cotangents = [torch.randn_like(x) for x in differentiable(plain)]
        expected = gradients_of(plain, leaves, cotangents)
    except Exception:
        return True
    if expected is None:
        return True
    entry.backward = True
    try:
        cotangents = [
            represented(c, chance) if isinstance(y, ScaledTensor) else c
            for c, y in zip(cotangents, differentiable(scaled), strict=True)
        ]
        found = gradients_of(scaled, scaled_leaves, cotangents)
        why = _gradients_differ(entry, expected, found)
    except Exception as error:
        why = f"{type(error).__name__}: {str(error)[:200]}"
    if why:
        entry.backward, entry.problem = False, f"backward: {why}"
    return not why


def represented(x: Tensor, chance: random.Random) -> ScaledTensor:
    """The same values with a float32 payload under a random power of two."""
    exponent = chance.randint(*EXPONENTS)
    return ScaledTensor(x.to(torch.float32) * 2.0**-exponent, 2.0**exponent, x.dtype)


def _floating(x) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def run_on(op, given, seed: int, convert):
    """The operator on converted copies of the inputs; its results, and the copies that want gradients."""
    seen, leaves = {}, []

    def copy(x):
        if not isinstance(x, Tensor) or x.layout != torch.strided:
            return x
        if not x.is_floating_point():
            return x.clone()
        if id(x) not in seen:
            made = convert(x)
            seen[id(x)] = made
            leaves.append(made.requires_grad_(op.supports_autograd))
        return seen[id(x)]

    arguments, options = tree_map(copy, given)
    torch.manual_seed(seed)
    return op(*arguments, **options), leaves


def _differs(entry: Entry, plain, scaled) -> str:
    left, right = tree_leaves(plain), tree_leaves(scaled)
    if len(left) != len(right):
        return f"{len(right)} results for {len(left)}"
    for number, (x, y) in enumerate(zip(left, right)):
        if isinstance(x, Tensor) != isinstance(y, Tensor):
            return f"result {number} is {type(y).__name__}"
        if not isinstance(x, Tensor):
            if x != y and not (isinstance(x, float) and abs(x - y) <= ATOL + RTOL * abs(x)) and x == x:
                return f"result {number} is {y} and not {x}"
            continue
        if why := _unequal(entry.name, x.detach(), y.detach()):
            return f"result {number}: {why}"
    return ""


def _unequal(name: str, x: Tensor, y: Tensor) -> str:
    if x.shape != y.shape or x.dtype != y.dtype:
        return f"{y.dtype}{list(y.shape)} for {x.dtype}{list(x.shape)}"
    if name.split(".")[0] in UNINITIALISED:
        return ""
    y = y.decode() if isinstance(y, ScaledTensor) else y
    if x.is_sparse or x.layout != torch.strided:
        x, y = x.to_dense(), y.to_dense()
    if not x.numel():
        return ""
    if not x.is_floating_point() and not x.is_complex():
        return "" if torch.equal(x, y) or name.startswith(RANDOM) else "other integers"
    finite = x[x.isfinite()].abs()
    largest = max(1.0, finite.max().item()) if finite.numel() else 1.0
    if torch.allclose(y, x, rtol=RTOL, atol=ATOL * largest, equal_nan=True):
        return ""
    if name.startswith(RANDOM) and _of_one_kind(x, y):
        return ""
    off = ((x - y).abs() / largest).nan_to_num(nan=float("inf"))
    return f"off by {off.max().item():.2g} of the largest"


def _of_one_kind(x: Tensor, y: Tensor) -> bool:
    """Random results: as finite, and of one root mean square within a factor of 4."""
    if bool(x.isfinite().all()) != bool(y.isfinite().all()):
        return False
    left, right = x.abs().square().mean().sqrt(), y.abs().square().mean().sqrt()
    return bool(left <= 4 * right + ATOL) and bool(right <= 4 * left + ATOL)


def differentiable(results) -> list[Tensor]:
    """The results that have a history."""
    return [x for x in tree_leaves(results) if isinstance(x, Tensor) and x.requires_grad]


def gradients_of(results, leaves: list[Tensor], cotangents: list[Tensor]):
    """The gradients of leaves, None where there is nothing to differentiate."""
    outputs = differentiable(results)
    if not outputs or not leaves:
        return None
    return torch.autograd.grad(outputs, leaves, cotangents, allow_unused=True)


def _gradients_differ(entry: Entry, expected, found) -> str:
    if found is None:
        return "no result is differentiable"
    for number, (x, y) in enumerate(zip(expected, found, strict=True)):
        if x is None and y is None:
            continue
        x = torch.zeros_like(y.decode() if isinstance(y, ScaledTensor) else y) if x is None else x
        y = torch.zeros_like(x) if y is None else y
        if why := _unequal(entry.name, x, y):
            return f"gradient {number}: {why}"
    return ""


def counted(entries: list[Entry]) -> dict[str, tuple[int, int]]:
    """Of the entries with a floating input: right forward, right backward, without fallback; each of how many."""
    floating = [entry for entry in entries if entry.forward is not None]
    backward = [entry for entry in floating if entry.backward is not None]
    return {
        "forward correct": (sum(entry.forward for entry in floating), len(floating)),
        "backward correct": (sum(entry.backward for entry in backward), len(backward)),
        "without fallback": (sum(not entry.fallbacks for entry in floating), len(floating)),
    }


BARS = {"forward correct": 0.99, "backward correct": 0.97, "without fallback": 0.85}


def tables(entries: list[Entry]) -> list[Table]:
    """The counts against their bars, the operators that fell back, and what is wrong."""
    columns = {"what": "", "entries": "", "of": "", "share": ".1%", "bar": "", "met": ""}
    summary = Table("op_db, float32, on scaled tensors", columns)
    for what, (count, total) in counted(entries).items():
        share = count / max(total, 1)
        summary.add(
            what=what, entries=count, of=total, share=share, bar=f">= {BARS[what]:.0%}", met=share >= BARS[what]
        )
    fell = Counter(name for entry in entries for name in entry.fallbacks)
    reasons = Table("Operators without a rule", {"operator": "", "entries": "", "for example": ""})
    for name, count in fell.most_common():
        example = next(entry.name for entry in entries if name in entry.fallbacks)
        reasons.add(operator=name, entries=count, **{"for example": example})
    wrong = Table("Wrong or refused", {"entry": "", "what": "", "why": ""})
    for entry in entries:
        if entry.problem:
            wrong.add(entry=entry.name, what=entry.problem, why=KNOWN.get(entry.name, "unknown"))
    each = Table(
        "Each entry", {"name": "", "samples": "", "forward": "", "backward": "", "fallbacks": "", "plain_results": ""}
    )
    for entry in entries:
        if entry.forward is not None:
            each.add(**(asdict(entry) | {"fallbacks": ", ".join(entry.fallbacks)}))
    return [summary, reasons, wrong, each]


def main() -> None:
    """All entries, or those whose names hold a word; the table, and the JSON where all ran."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", help="only entries whose names hold one of these")
    parser.add_argument("--most", type=int, help="samples per entry; all by default")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    chosen = [op for op in operators() if not options.words or any(word in name_of(op) for word in options.words)]
    entries = []
    for op in chosen:
        start = time.perf_counter()
        entries.append(examined(op, options.seed, options.most))
        entry = entries[-1]
        if options.words or time.perf_counter() - start > 10:
            print(f"{entry} {time.perf_counter() - start:.1f} s", flush=True)
    result = Result(
        "op_coverage",
        "Operators on scaled tensors",
        "Every float32 entry of torch's op_db that has a floating input and is neither sparse nor jiterator, on all of "
        "its sample inputs as scaled tensors of float32 payload under random powers of two, against the plain "
        f"operator (rtol {RTOL:g}, atol {ATOL:g} of the largest element). Random results that differ under one seed "
        "are compared by shape, finiteness and root mean square; uninitialised ones by shape and dtype.",
        "python -m benchmarks.bench_op_coverage",
        tables=tables(entries),
    )
    if options.words or options.most:
        from ._results import show

        result.tables = result.tables[:3]
        show(result)
    else:
        save(result)


if __name__ == "__main__":
    main()
