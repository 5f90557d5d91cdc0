"""What one operator of op_db does with the digits of MCTensors, beside the same in four float64.

An operator's operands in a format are also taken as four float64 each, which hold them exactly; what these give is the
reference. It is checked itself against torch's own float64, and against mpmath in the tests. A result may be off by
2^-(bits - SLACK) times its own size and times what it changes by when every operand changes by its last bit: an element
that cancels has no more digits than its operands leave it.
"""

import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from halfulp.tensors import MCTensor, recorded
from halfulp.tensors import _mctensor as tensor_file
from halfulp.tensors._formula_constants import terms_of

from .bench_op_coverage import RANDOM, UNINITIALISED, differentiable, gradients_of, name_of, run_on, samples_of

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
FAR = {torch.float16: 20}
NUMBER = 0.3
# torch's own float64 against four of them: the same function, whatever digits either loses.
SAME = 2.0**-20


class Situation(NamedTuple):
    """One way to call an operator."""

    kind: str
    case: str
    gradients: str


@dataclass
class Finding:
    """What came of it: "within", "counted", "outside", "NaN", "refused" or "differs"; None where it says nothing."""

    verdict: str | None
    ratio: float = 0.0  # of the bound
    where: str = ""
    fallbacks: dict[str, int] = field(default_factory=dict)


ORDER = (None, "within", "counted", "refused", "outside", "NaN", "differs")


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
            floating = [x for x in leaves if _is_floating(x) and x.numel()]
            if (
                floating
                and sum(x.numel() for x in leaves) <= LARGEST
                and all(x.layout == torch.strided for x in leaves)
            ):
                found.append(sample)
    return found[:most]


def findings(op, most: int, seed: int, situations: list[Situation]) -> Iterator[tuple[Situation, Finding]]:
    """The worst finding of every situation over some samples."""
    samples = small_samples(op, most, seed)
    for situation in situations:
        worst = Finding(None)
        for number, sample in enumerate(samples):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = _finding(op, sample, situation, seed + number)
            if (ORDER.index(found.verdict), found.ratio) > (ORDER.index(worst.verdict), worst.ratio):
                worst = found
        yield situation, worst


def _given(sample):
    return (sample.input, *sample.args), sample.kwargs


def _is_floating(x) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


class _Operands:
    """An operator's floating operands in one situation: as they are given, and wide."""

    def __init__(self, given, situation: Situation, seed: int) -> None:
        self.dtype, self.count = FORMATS[situation.kind]
        self.chance = torch.Generator().manual_seed(seed)
        distinct = {id(x): x for x in tree_leaves(given) if _is_floating(x)}
        several = situation.case == "plain operands"
        self.useful = len(distinct) > 1 or not several
        self.made = {}
        for number, (key, x) in enumerate(distinct.items()):
            plain = several and number != seed % len(distinct)
            far = situation.case == "far element" and number == 0
            self.made[key] = self._plain(x) if plain else self._encoded(x, situation, far)

    def _plain(self, x: Tensor) -> Tensor:
        return x.detach().to(self.dtype)

    def _encoded(self, x: Tensor, situation: Situation, far: bool) -> MCTensor:
        x = x.detach().clone()
        if far and x.numel() > 1:
            x.view(-1)[0] *= 2.0 ** FAR.get(self.dtype, 40) if x.is_contiguous() else 1.0
        return MCTensor.encode(self._exact(x, situation.case), self.count, self.dtype, gradients=situation.gradients)

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

    def given(self, x: Tensor) -> Tensor:
        return self.made[id(x)].detach()

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


def _finding(op, sample, situation: Situation, seed: int) -> Finding:
    given = _given(sample)
    if situation.case == "constants":
        if len(sample.args) < 1 or not _is_floating(sample.args[0]):
            return Finding(None)
        given = (sample.input, NUMBER, *sample.args[1:]), sample.kwargs
    operands = _Operands(given, situation, seed)
    if not operands.useful:
        return Finding(None)
    try:
        native = _outcome(op, given, seed, operands.native, None)
    except Exception:  # what torch itself refuses says nothing
        return Finding(None)
    with recorded() as counts:
        try:
            found = _outcome(op, given, seed, operands.given, (operands.dtype, operands.count))
        except Exception as error:
            return Finding("refused", 0.0, f"{type(error).__name__}: {str(error)[:160]}")
    fallbacks = dict(counts)
    with recorded() as counts:
        try:
            wide = _outcome(op, given, seed, operands.wide, (operands.dtype, operands.count))
            moved = _moves(op, given, seed, operands)
        except Exception as error:
            return Finding("refused", 0.0, f"four float64: {type(error).__name__}: {str(error)[:160]}")
    reference = native if counts else wide
    bits = min(operands.count * PRECISION[operands.dtype], 48 if fallbacks or counts else 1000)
    return _judged(op, found, reference, moved, native, bits, situation, operands.dtype, fallbacks)


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


def _moves(op, given, seed: int, operands: _Operands) -> list[_Outcome]:
    step = 2.0 ** -min(operands.count * PRECISION[operands.dtype], 106)
    return [_outcome(op, given, seed, operands.moved(sign * step), None) for sign in (1, -1)]


def _judged(op, found, reference, moved, native, bits, situation, dtype, fallbacks) -> Finding:
    worst = Finding("counted" if fallbacks else "within", 0.0, "", fallbacks)
    own = PRECISION[dtype] if situation.gradients == "first" else bits
    own_slack = FIRST_SLACK if situation.gradients == "first" else GRADIENT_SLACK
    step_bits = min(FORMATS[situation.kind][1] * PRECISION[dtype], 106)
    for what, spare in (("results", (bits, SLACK)), ("gradients", (min(own, bits), own_slack))):
        rows = zip(getattr(found, what), getattr(reference, what), getattr(native, what), strict=False)
        for number, (x, wanted, plain) in enumerate(rows):
            if is_random(op) or not _is_floating(plain) or not isinstance(x, Tensor) or wanted is None:
                continue
            steps = [getattr(outcome, what)[number] for outcome in moved]
            verdict, ratio = _compared(x, wanted, steps, plain, spare, 2.0**step_bits, dtype)
            where = f"{what[:-1]} {number}"
            if (ORDER.index(verdict), ratio) > (ORDER.index(worst.verdict), worst.ratio):
                worst = Finding(verdict, ratio, where, fallbacks)
    return worst


def _compared(x, wanted, steps, plain, spare, per_step: float, dtype) -> tuple[str, float]:
    """Whether a result is within its bound, and how much of that it takes."""
    bits, slack = spare
    if type(x) is Tensor and bits > PRECISION[x.dtype]:  # a plain operand's gradient
        bits, slack = PRECISION[x.dtype], FIRST_SLACK
    if x.shape != plain.shape:
        return "differs", 0.0
    if not x.numel():
        return "within", 0.0
    reference, is_plain = _wide(wanted), type(x) is Tensor
    finite = plain.isfinite() & (plain.abs() < torch.finfo(dtype).max / 4) & reference.decode().isfinite()
    gap = (_wide(x) - reference).decode().abs()
    if bool((~gap.isfinite() & finite).any()):
        return "NaN", 0.0
    size = reference.decode().abs()
    changes = torch.stack([(_wide(step) - _wide(wanted)).decode().abs() for step in steps]) if steps else gap * 0
    change = changes.nan_to_num(nan=0.0, posinf=0.0).amin(0) * per_step if steps else gap * 0
    floor = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps * 64
    if dtype == torch.float16:
        # One scale serves a whole tensor; a plain gradient has none.
        floor = 2.0**-30 * float(size[finite].max() if bool(finite.any()) else 0.0) + (2.0**-22 if is_plain else 0.0)
    allowed = 2.0 ** (slack - bits) * (size + change) + floor
    same = SAME * (size + change * 2.0**-48 + float(size[finite].max() if bool(finite.any()) else 0.0)) + floor
    if bool((((plain - reference.decode()).abs() > same) & finite).any()):
        return "differs", 0.0
    ratio = float((gap / allowed)[finite].nan_to_num(nan=0.0).max()) if bool(finite.any()) else 0.0
    return ("outside" if ratio > 1 else "within"), ratio


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
            for x in tree_leaves((arguments, options)):
                value = _number(x)
                if value is not None and _is_long(value) and value not in allowed and terms_of(value) is None:
                    seen.setdefault(value, str(operator))
            return rule(*arguments, **options)

        return call

    for sample in small_samples(op, most, seed):
        given = _given(sample)
        allowed = {abs(value) for x in tree_leaves(given) if (value := _number(x)) is not None}
        operands = _Operands(given, Situation("2 x f64", "components", "components"), seed)
        tensor_file.rule_of = watched
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                _outcome(op, given, seed, operands.given, (torch.float64, 2))
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
