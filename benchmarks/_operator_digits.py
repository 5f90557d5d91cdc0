"""What one operator of op_db does with the digits of MCTensors, beside the same in four float64.

An operator's operands in a format are also taken as four float64 each, which hold them exactly; what these give is the
reference: see _operator_judge.
"""

import math
import random
import warnings
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from halfulp.mctensor import MCTensor
from halfulp.mctensor import _mctensor as tensor_file
from halfulp.subclass import record_fallbacks

from ._operator_judge import (
    LAST,
    PRECISION,
    WIDER,
    Finding,
    Outcome,
    References,
    check_reference,
    judged,
    severity,
)
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
LARGEST = 300  # elements of all operands together
# One scale serves a whole tensor; squares, and their last components, are in range.
FAR = {torch.float16: 8, torch.float32: 24}
# torch's float64 takes one step a unit from a far negative argument to the positive ones.
POSITIVE = ("polygamma", "special.polygamma", "special.zeta", "digamma", "mvlgamma")
# What torch's float64 is no reference for: its results have no digits for some arguments, in all cases or in some.
LOSSY = {
    "nn.functional.group_norm": ("1 / n is a float64 in its gradient, which cancels", ("far element",)),
    "special.ndtr": ("1 + erf cancels far below zero", CASES),
    "nn.functional.triplet_margin_loss": ("two distances of 2^40 cancel", ("far element",)),
    "nn.functional.triplet_margin_with_distance_loss": ("two distances of 2^40 cancel", ("far element",)),
    "sinc": ("pi times a far number is rounded", ("far element",)),
}
# Whose gradients torch itself does not make the slope of the results.
NO_SLOPE = {
    "cholesky": "of a matrix that is symmetric; a change here is not",
    "linalg.cholesky": "of a matrix that is symmetric; a change here is not",
    "nn.functional.max_unpool1d": "several elements go to one place, and all have its gradient",
    "nn.functional.max_unpool2d": "several elements go to one place, and all have its gradient",
    "nn.functional.max_unpool3d": "several elements go to one place, and all have its gradient",
    "as_strided_scatter": "an element that is written over has a gradient",
}
NUMBER = 0.3


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
                worst = {name: max(worst[name], found[name], key=severity) for name in GRADIENTS}
            for gradients, finding in worst.items():
                yield (kind, case, gradients), finding


def _given(sample):
    return (sample.input, *sample.args), sample.kwargs


def _is_floating(x) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


class _Operands:
    """An operator's floating operands in one situation: as they are given, and wide."""

    def __init__(self, given, kind: str, case: str, seed: int, positive: bool = False) -> None:
        self.dtype, self.count = FORMATS[kind]
        self.chance = torch.Generator().manual_seed(seed)
        distinct = {id(x): x for x in tree_leaves(given) if _is_floating(x)}
        several = case == "plain operands"
        self.useful = len(distinct) > 1 or not several
        self.made = {}
        for number, (key, x) in enumerate(distinct.items()):
            plain = several and number != seed % len(distinct)
            far = (1 + positive) * (case == "far element" and number == 0)
            self.made[key] = self._plain(x) if plain else self._encoded(x, case, far)

    def _plain(self, x: Tensor) -> Tensor:
        return x.detach().to(self.dtype)

    def _encoded(self, x: Tensor, case: str, far: int) -> MCTensor:
        """far: 1 for one far element, 2 for a positive one."""
        x = x.detach().contiguous().clone()
        if far and x.numel() > 1:
            first = x.view(-1)[0]
            x.view(-1)[0] = (first if far == 1 else first.abs()) * 2.0 ** FAR.get(self.dtype, 40)
        return MCTensor.encode(self._exact(x, case), self.count, self.dtype)

    def _exact(self, x: Tensor, case: str) -> MCTensor:
        """Digits below a float64's, or below a gap; whole numbers stay, as operators compare labels with them."""
        bits = PRECISION[self.dtype]
        sign = _sign(x, self.chance)
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

    def direction(self, x: Tensor) -> MCTensor:
        """What an operand is changed by: itself, each element with a sign."""
        chance = torch.Generator().manual_seed(1 + list(self.made).index(id(x)))
        wide = self.wide(x)
        return (wide * _sign(x, chance)).detach()

    def moved(self, step: float) -> Callable[[Tensor], MCTensor]:
        """The wide operands, each changed by that share."""
        return lambda x: (self.wide(x) + self.direction(x) * step).detach()


def _sign(x: Tensor, chance: torch.Generator) -> Tensor:
    """1 or -1 by chance, and 0 for whole numbers."""
    sign = torch.randint(0, 2, x.shape, generator=chance).double() * 2 - 1
    return sign.masked_fill(x == x.round(), 0.0)


def _examined(op, sample, kind: str, case: str, seed: int) -> dict[str, Finding]:
    """One sample in one format and case, with both ways of keeping gradients."""
    nothing = dict.fromkeys(GRADIENTS, Finding(None))
    given = _given(sample)
    if case == "constants":
        if len(sample.args) < 1 or not _is_floating(sample.args[0]):
            return nothing
        given = (sample.input, NUMBER, *sample.args[1:]), sample.kwargs
    try:
        operands = _Operands(given, kind, case, seed, name_of(op).startswith(POSITIVE))
    except ValueError as error:  # a value that float16 does not hold
        return dict.fromkeys(GRADIENTS, _raised(error))
    if not operands.useful:
        return nothing
    try:
        native = _outcome(op, given, seed, operands.native)
    except Exception:  # what torch itself refuses says nothing
        return nothing
    seeks_cuts = (kind, case) == ("2 x f64", "components")
    try:
        with record_fallbacks() as counts:
            reference = _references(op, given, seed, operands, seeks_cuts)
    except Exception as error:
        return dict.fromkeys(GRADIENTS, _raised(error, "four float64: "))
    if counts:
        results = native.results if reference.wide.counts else reference.wide.results
        wide = reference.wide._replace(results=results, gradients=native.gradients)
        reference = reference._replace(wide=wide)
    has_slope = name_of(op) not in NO_SLOPE
    checked = Finding("within")
    if seeks_cuts and not counts:
        checked = check_reference(reference, native, has_slope=has_slope)

    def judge(*proved: str) -> dict[str, Finding]:
        every = (op, given, seed, operands, kind, reference, native, dict(counts), proved)
        return {name: max(_finding(name, *every), checked, key=severity) for name in GRADIENTS}

    lossy = ("results",) if case in LOSSY.get(name_of(op), ("", ()))[1] else ()
    own = judge(*lossy)
    differs = any(finding.verdict == "differs" and "gradient" in finding.where for finding in own.values())
    # torch's formula of a gradient may lose all digits in float64: the results' slope tells which is right.
    if differs and not counts and _is_slope(_references(op, given, seed, operands, True), native):
        return judge(*lossy, "gradients")
    return own


def _is_slope(reference: References, native: Outcome) -> bool:
    return check_reference(reference, native, must_prove=True).verdict == "within"


def _finding(gradients, op, given, seed, operands, kind, reference, native, wide_counts, proved) -> Finding:
    with record_fallbacks() as counts:
        try:
            found = _outcome(op, given, seed, operands.given(gradients))
        except Exception as error:
            same = _error(lambda: _outcome(op, given, seed, lambda x: operands.native(x).to(operands.dtype)))
            return _raised(error, is_torchs=str(same) == str(error))
    return judged(found, reference, native, FORMATS[kind], gradients, dict(counts or wide_counts), proved)


def _error(call: Callable) -> Exception | None:
    try:
        call()
    except Exception as error:
        return error
    return None


def _raised(error: Exception, where: str = "", is_torchs: bool = False) -> Finding:
    """is_torchs: whether plain tensors of the components' dtype raise the same."""
    refused = is_torchs or isinstance(error, (NotImplementedError, ValueError, TypeError))
    return Finding("refused" if refused else "fails", 0.0, f"{where}{type(error).__name__}: {str(error)[:160]}")


def _references(op, given, seed: int, operands: _Operands, seeks_cuts: bool) -> References:
    step = 2.0 ** -min(operands.count * PRECISION[operands.dtype], 106)
    steps = (LAST, -LAST, WIDER, -WIDER) if seeks_cuts else (step, -step)
    moved = {by: _outcome(op, given, seed, operands.moved(by)) for by in steps}
    distinct = {id(x): x for x in tree_leaves(given) if _is_floating(x)}
    return References(
        _outcome(op, given, seed, operands.wide), moved, [operands.direction(x) for x in distinct.values()]
    )


def _outcome(op, given, seed: int, convert: Callable) -> Outcome:
    with record_fallbacks() as counts:
        results, leaves = run_on(op, given, seed, convert)
    flat = [x.detach() if isinstance(x, Tensor) else x for x in tree_leaves(results)]
    if not op.supports_autograd or is_random(op):
        return Outcome(flat, [], [], dict(counts))
    cotangents = [_cotangent(x) for x in differentiable(results)]
    found = gradients_of(results, leaves, cotangents) if cotangents else None
    return Outcome(flat, [] if found is None else list(found), cotangents, dict(counts))


def _cotangent(x: Tensor) -> Tensor:
    """The same numbers for every form of a result."""
    chance = torch.Generator().manual_seed(1 + x.numel())
    values = torch.randn(x.shape, generator=chance, dtype=torch.float64).to(torch.bfloat16)
    if isinstance(x, MCTensor):
        return MCTensor.encode(values.to(x.dtype), len(x.components), x.dtype, gradients=x.gradients)
    return values.to(x.dtype)


def long_constants(op, most: int, seed: int) -> dict[float, str]:
    """The inexact numbers that an operator meets and that nobody gave it, each with where.

    Such a number cuts a result to a float64's digits in the reference too, so that no comparison shows it.
    """
    seen: dict[float, str] = {}
    before = tensor_file.find_rule

    def watched(operator):
        rule = before(operator)

        def call(*arguments, **options):
            # What copy_ writes into may hold anything.
            for x in tree_leaves((arguments, options)) if "copy_" not in str(operator) else ():
                value = _number(x)
                if value is not None and _is_long(value) and math.frexp(value)[0] not in allowed:
                    seen.setdefault(value, str(operator))
            return rule(*arguments, **options)

        return call

    for sample in [] if is_random(op) else small_samples(op, most, seed):
        given = _given(sample)
        allowed = {math.frexp(value)[0] for x in tree_leaves(given) if (value := _number(x)) is not None}
        operands = _Operands(given, "2 x f64", "components", seed)
        tensor_file.find_rule = watched
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                _outcome(op, given, seed, operands.given("components"))
        except Exception:
            continue
        finally:
            tensor_file.find_rule = before
    return seen


def _number(x) -> float | None:
    if isinstance(x, float):
        return abs(x)
    if isinstance(x, Tensor) and not isinstance(x, MCTensor) and x.dim() == 0 and x.dtype == torch.float64:
        return abs(float(x))
    return None


def _is_long(value: float) -> bool:
    """Whether neither a float32 holds a number nor few decimal digits name it."""
    if value != value or value in (float("inf"), 0.0, torch.finfo(torch.float64).max):
        return False
    return float(torch.tensor(value).float()) != value and float(f"{value:.8g}") != value
