"""What one operator of op_db does with the digits of MCTensors, beside the same in four float64.

An operator's operands in a format are also taken as four float64 each, which hold them exactly; what these give is the
reference. It is checked itself against torch's own float64, and against mpmath in the tests. A result may be off by
2^-(bits - SLACK) times its own size and times what it changes by when every operand changes by its last bit: an element
that cancels has no more digits than its operands leave it.
"""

import math
import random
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from halfulp.tensors import MCTensor, recorded
from halfulp.tensors import _mctensor as tensor_file
from halfulp.tensors._formula_constants import terms_of

from .bench_op_coverage import (
    RANDOM,
    UNINITIALISED,
    differentiable,
    gradients_of,
    name_of,
    run_on,
    samples_of,
)
from .bench_op_coverage import operators as operators

FORMATS = {
    "2 x bf16": (torch.bfloat16, 2),
    "2 x fp16": (torch.float16, 2),
    "2 x f32": (torch.float32, 2),
    "2 x f64": (torch.float64, 2),
    "3 x f32": (torch.float32, 3),
}
CASES = ("components", "plain operands", "constants", "gaps", "far element")
GRADIENTS = ("first", "components")
PRECISION = {torch.bfloat16: 8, torch.float16: 11, torch.float32: 24, torch.float64: 53}
# Bits that a result and a gradient may be short of what the components hold.
SLACK, GRADIENT_SLACK, FIRST_SLACK = 10, 12, 4
LARGEST = 300  # elements of all operands together
FAR = {torch.float16: 8}  # one scale serves a whole tensor
NUMBER = 0.3
# torch's own float64 against four of them: the same function, whatever digits either loses.
SAME = 2.0**-20


@dataclass
class Finding:
    """What came of it: See VERDICTS; None where it says nothing."""

    verdict: str | None
    ratio: float = 0.0  # of the bound
    where: str = ""
    fallbacks: dict[str, int] = field(default_factory=dict)


VERDICTS = {
    "within": "every element within the bound",
    "counted": "through float64, and `fallbacks` says so",
    "refused": "an error that says what to do",
    "cut": "through float64, uncounted: a change of the last bits of the operands changes nothing",
    "outside": "an element beyond the bound",
    "NaN": "an element that is not finite where float64's is",
    "differs": "four float64 components give another function than torch's float64",
}
ORDER = (None, *VERDICTS)


def is_random(op) -> bool:
    """Whether results are drawn, or hold what memory held."""
    return name_of(op).startswith(RANDOM) or op.name.split(".")[0] in UNINITIALISED


def small_samples(op, most: int, seed: int) -> list:
    """Some of torch's own samples in float64, with few elements."""
    torch.manual_seed(seed)
    chance = random.Random(f"{seed} {name_of(op)}")
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _, sample in samples_of(op, 12, chance, torch.float64):
            leaves = [x for x in tree_leaves(_given(sample)) if isinstance(x, Tensor)]
            dense = all(x.layout == torch.strided for x in leaves)
            if dense and any(_is_floating(x) and x.numel() for x in leaves):
                found.append((sum(x.numel() for x in leaves), sample))
    small = [sample for size, sample in found if size <= LARGEST]
    return (small or [sample for _, sample in sorted(found, key=lambda row: row[0])])[:most]


def findings(op, most: int, seed: int, kinds: Iterable[str], cases: Iterable[str]) -> Iterator[tuple]:
    """The worst finding of every situation over some samples: (format, case, gradients), finding."""
    samples = [] if is_random(op) else small_samples(op, most, seed)
    for kind in kinds:
        for case in cases:
            worst = dict.fromkeys(GRADIENTS, Finding(None))
            for number, sample in enumerate(samples):
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    found = _examined(op, sample, kind, case, seed + number)
                worst = {name: max(worst[name], found[name], key=_severity) for name in GRADIENTS}
            for gradients, finding in worst.items():
                yield (kind, case, gradients), finding


def _severity(finding: Finding) -> tuple[int, float]:
    return ORDER.index(finding.verdict), finding.ratio


def _given(sample):
    return (sample.input, *sample.args), sample.kwargs


def _is_floating(x) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


class _Operands:
    """An operator's floating operands in one situation: as they are given, and wide."""

    def __init__(self, given, kind: str, case: str, seed: int) -> None:
        self.dtype, self.count = FORMATS[kind]
        self.chance = torch.Generator().manual_seed(seed)
        distinct = {id(x): x for x in tree_leaves(given) if _is_floating(x)}
        several = case == "plain operands"
        self.useful = len(distinct) > 1 or not several
        self.made = {}
        for number, (key, x) in enumerate(distinct.items()):
            plain = several and number != seed % len(distinct)
            far = case == "far element" and number == 0
            self.made[key] = self._plain(x) if plain else self._encoded(x, case, far)

    def _plain(self, x: Tensor) -> Tensor:
        return x.detach().to(self.dtype)

    def _encoded(self, x: Tensor, case: str, far: bool) -> MCTensor:
        x = x.detach().contiguous().clone()
        if far and x.numel() > 1:
            x.view(-1)[0] *= 2.0 ** FAR.get(self.dtype, 40)
        return MCTensor.encode(self._exact(x, case), self.count, self.dtype)

    def _exact(self, x: Tensor, case: str) -> MCTensor:
        """Digits below a float64's, or below a gap."""
        bits = PRECISION[self.dtype]
        sign = torch.randint(0, 2, x.shape, generator=self.chance).double() * 2 - 1
        if case == "gaps":
            first = x.to(self.dtype).double()
            return MCTensor.from_components([first, first * sign * 2.0 ** -(bits * self.count + 20)])
        share = torch.rand(x.shape, generator=self.chance, dtype=torch.float64)
        x = x.double()
        return MCTensor.from_components([x, x * sign * share * 2.0**-54])

    def given(self, gradients: str) -> Callable[[Tensor], Tensor]:
        """The operands as they are, MCTensors with that way of keeping gradients."""

        def convert(x: Tensor) -> Tensor:
            made = self.made[id(x)].detach()
            return made.with_gradients(gradients) if isinstance(made, MCTensor) else made

        return convert

    def wide(self, x: Tensor) -> MCTensor:
        return MCTensor.encode(self.made[id(x)].detach(), 4, torch.float64, gradients="components")

    def native(self, x: Tensor) -> Tensor:
        made = self.made[id(x)].detach()
        return made.decode() if isinstance(made, MCTensor) else made.double()

    def moved(self, step: float) -> Callable[[Tensor], MCTensor]:
        """The wide operands, each element changed by that share of itself, up or down."""

        def convert(x: Tensor) -> MCTensor:
            chance = torch.Generator().manual_seed(x.numel())
            sign = torch.randint(0, 2, x.shape, generator=chance).double() * 2 - 1
            wide = self.wide(x)
            return (wide + wide * sign * step).detach()

        return convert


def _examined(op, sample, kind: str, case: str, seed: int) -> dict[str, Finding]:
    """One sample in one format and case, with both ways of keeping gradients."""
    nothing = dict.fromkeys(GRADIENTS, Finding(None))
    given = _given(sample)
    if case == "constants":
        if len(sample.args) < 1 or not _is_floating(sample.args[0]):
            return nothing
        given = (sample.input, NUMBER, *sample.args[1:]), sample.kwargs
    try:
        operands = _Operands(given, kind, case, seed)
    except ValueError as error:  # a value that float16 does not hold
        return dict.fromkeys(GRADIENTS, Finding("refused", 0.0, _said(error)))
    if not operands.useful:
        return nothing
    try:
        native = _outcome(op, given, seed, operands.native, None)
    except Exception:  # what torch itself refuses says nothing
        return nothing
    try:
        with recorded() as counts:
            reference = _references(op, given, seed, operands, (kind, case) == ("2 x f64", "components"))
    except Exception as error:
        return dict.fromkeys(GRADIENTS, Finding("refused", 0.0, f"four float64: {_said(error)}"))
    if counts:
        reference = reference._replace(wide=native)
    return {name: _finding(op, given, seed, operands, kind, name, reference, native, counts) for name in GRADIENTS}


def _finding(op, given, seed, operands, kind, gradients, reference, native, wide_counts) -> Finding:
    with recorded() as counts:
        try:
            found = _outcome(op, given, seed, operands.given(gradients), FORMATS[kind])
        except Exception as error:
            return Finding("refused", 0.0, _said(error))
    held = FORMATS[kind][1] * PRECISION[operands.dtype]
    bits = min(held, 48) if counts or wide_counts else held
    return _judged(found, reference, native, bits, kind, gradients, dict(counts), wide_counts)


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:160]}"


class _References(NamedTuple):
    """What four float64 components give, and what they give when operands change by their last bits, or by more."""

    wide: "_Outcome"
    moved: list["_Outcome"]


def _references(op, given, seed: int, operands: _Operands, seeks_cuts: bool) -> _References:
    kind = operands.dtype, operands.count
    step = 2.0 ** -min(operands.count * PRECISION[operands.dtype], 106)
    steps = (step, -step, 2.0**-20) if seeks_cuts else (step, -step)
    moved = [_outcome(op, given, seed, operands.moved(by), kind) for by in steps]
    return _References(_outcome(op, given, seed, operands.wide, kind), moved)


class _Outcome(NamedTuple):
    """Results and gradients, as they came."""

    results: list
    gradients: list


def _outcome(op, given, seed: int, convert: Callable, kind: tuple | None) -> _Outcome:
    results, leaves = run_on(op, given, seed, convert)
    flat = [x.detach() if isinstance(x, Tensor) else x for x in tree_leaves(results)]
    if not op.supports_autograd or is_random(op):
        return _Outcome(flat, [])
    cotangents = [_cotangent(x, kind) for x in differentiable(results)]
    found = gradients_of(results, leaves, cotangents) if cotangents else None
    return _Outcome(flat, [] if found is None else list(found))


def _cotangent(x: Tensor, kind: tuple | None) -> Tensor:
    """The same numbers for every form of a result."""
    chance = torch.Generator().manual_seed(1 + x.numel())
    values = torch.randn(x.shape, generator=chance, dtype=torch.float64).to(torch.bfloat16)
    if isinstance(x, MCTensor):
        return MCTensor.encode(values.to(x.dtype), len(x.components), x.dtype, gradients=x.gradients)
    return values.to(x.dtype)


def _judged(found, reference, native, bits, kind, gradients, fallbacks, wide_counts) -> Finding:
    worst = Finding("counted" if fallbacks else "within", 0.0, "", fallbacks)
    dtype, count = FORMATS[kind]
    own = (PRECISION[dtype], FIRST_SLACK) if gradients == "first" else (bits, GRADIENT_SLACK)
    for what, (held, slack) in (("results", (bits, SLACK)), ("gradients", (min(own[0], bits), own[1]))):
        wanted = getattr(reference.wide, what)
        for number, (x, y, plain) in enumerate(zip(getattr(found, what), wanted, getattr(native, what), strict=False)):
            if not _is_floating(plain) or not isinstance(x, Tensor) or y is None:
                continue
            steps = [getattr(outcome, what)[number] for outcome in reference.moved]
            verdict, ratio = _compared(x, y, steps, plain, (held, slack), 2.0 ** min(count * PRECISION[dtype], 106))
            if verdict in ("cut", "outside", "differs") and (fallbacks or wide_counts):
                verdict = "counted"
            worst = max(worst, Finding(verdict, ratio, f"{what[:-1]} {number}", fallbacks), key=_severity)
    return worst


def _compared(x, wanted, steps, plain, spare, per_step: float) -> tuple[str, float]:
    """Whether a result is within its bound, and how much of that it takes."""
    bits, slack = spare
    if x.shape != plain.shape or x.dtype.is_complex:
        return "differs", 0.0
    if not x.numel():
        return "within", 0.0
    if type(x) is Tensor and bits > PRECISION[x.dtype]:  # a plain operand's gradient
        bits, slack = PRECISION[x.dtype], FIRST_SLACK
    bits = min(bits, PRECISION[x.dtype] * (len(x.components) if isinstance(x, MCTensor) else 1))
    reference, is_plain = _wide(wanted), type(x) is Tensor
    size = reference.decode().abs()
    finite = plain.isfinite() & (plain.abs() < torch.finfo(x.dtype).max / 4) & size.isfinite()
    gap = (_wide(x) - reference).decode().abs()
    if bool((~gap.isfinite() & finite).any()):
        return "NaN", 0.0
    if not bool(finite.any()):
        return "within", 0.0
    changes = [_change(step, wanted) for step in steps]
    change = torch.minimum(changes[0], changes[1]) * per_step
    largest = float(size[finite].max())
    floor = torch.finfo(x.dtype).smallest_normal * torch.finfo(x.dtype).eps * 64
    if x.dtype == torch.float16:
        # One scale serves a whole tensor; a plain gradient has none.
        floor = 2.0**-30 * largest + (2.0**-22 if is_plain else 0.0)
    same = SAME * (size + largest) + change * 2.0**-48 + floor + 8 * torch.finfo(plain.dtype).eps * size + 2.0**-40
    if bool((((plain - reference.decode()).abs() > same) & finite).any()):
        return "differs", 0.0
    # What torch's own formula loses in float64 it loses with more digits too; a wide format is computed so.
    lost = (plain - reference.decode()).abs()[finite].max() * 2.0**53
    is_wide = wanted is not plain and wanted.dtype == torch.float64
    if is_wide and changes[2:] and not bool(changes[0].any()) and bool((changes[2] > 2.0**-50 * (size + lost)).any()):
        return "cut", 0.0
    change = change + lost
    if per_step <= 2.0**53:
        floor = floor + 2.0**-52 * lost
    ratio = float((gap / (2.0 ** (slack - bits) * (size + change) + floor))[finite].nan_to_num(nan=0.0).max())
    return ("outside" if ratio > 1 else "within"), ratio


def _change(step: Tensor, wanted: Tensor) -> Tensor:
    return (_wide(step) - _wide(wanted)).decode().abs().nan_to_num(nan=0.0, posinf=0.0)


def _wide(x: Tensor) -> MCTensor:
    return MCTensor.encode(x.detach(), 4, torch.float64, gradients="components")


def long_constants(op, most: int, seed: int) -> dict[float, str]:
    """The inexact numbers that an operator meets and that nobody gave it, each with where.

    Such a number cuts a result to a float64's digits in the reference too, so that no comparison shows it.
    """
    seen: dict[float, str] = {}
    before = tensor_file.rule_of

    def watched(operator):
        rule = before(operator)

        def call(*arguments, **options):
            # What copy_ writes into may hold anything.
            for x in tree_leaves((arguments, options)) if "copy_" not in str(operator) else ():
                value = _number(x)
                if (
                    value is not None
                    and _is_long(value)
                    and math.frexp(value)[0] not in allowed
                    and terms_of(value) is None
                ):
                    seen.setdefault(value, str(operator))
            return rule(*arguments, **options)

        return call

    for sample in [] if is_random(op) else small_samples(op, most, seed):
        given = _given(sample)
        allowed = {math.frexp(value)[0] for x in tree_leaves(given) if (value := _number(x)) is not None}
        operands = _Operands(given, "2 x f64", "components", seed)
        tensor_file.rule_of = watched
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                _outcome(op, given, seed, operands.given("components"), (torch.float64, 2))
        except Exception:
            continue
        finally:
            tensor_file.rule_of = before
    return seen


def _number(x) -> float | None:
    if isinstance(x, float):
        return abs(x)
    if isinstance(x, Tensor) and not isinstance(x, MCTensor) and x.dim() == 0 and x.dtype == torch.float64:
        return abs(float(x))
    return None


def _is_long(value: float) -> bool:
    """Whether neither a float32 holds a number nor few decimal digits name it."""
    if value != value or value in (float("inf"), 0.0):
        return False
    return float(torch.tensor(value).float()) != value and float(f"{value:.8g}") != value
