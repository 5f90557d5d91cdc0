"""Whether a result of an operator on MCTensors has the digits that it should have.

A result is held against the same call on four float64 components. An element may be off by 2^(slack - bits) times its
own size and times what it changes by when every operand changes by its last bit, and by what torch's own formula loses
there in float64: that is measured beside, element by element, and counts no more for a small element than the same
share of it that any element loses.
The reference is checked in its turn: it must be torch's function (float64's value of each element, to what float64
itself can lose), respond to changes of the operands' last bits as it does to larger ones, which no step in float64
does, and its gradients must be the slope of its results.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfulp.mctensor import MCTensor

PRECISION = {torch.bfloat16: 8, torch.float16: 11, torch.float32: 24, torch.float64: 53}
# Bits that a result, a gradient of components and a plain gradient may be short of what they hold.
SLACK, GRADIENT_SLACK, FIRST_SLACK = 10, 12, 4
# What is held to of results that went through float64.
COUNTED = 48
# How far torch's float64 and four of them may be apart and still be one function.
SAME = 2.0**-20
# A change of the operands' last bits, and one by which slopes are measured.
LAST, WIDER = 2.0**-106, 2.0**-50


@dataclass
class Finding:
    """What came of it: See VERDICTS; None where it says nothing."""

    verdict: str | None
    ratio: float = 0.0  # of the bound
    where: str = ""
    fallbacks: dict[str, int] = field(default_factory=dict)


VERDICTS = {
    "within": "every element within the bound",
    "plain": "a complex result, which is plain, within the bound of its own dtype",
    "counted": "through float64, and `fallbacks` says so; within the bound of float64",
    "refused": "an error that says what to do",
    "fails": "another error",
    "cut": "digits lost uncounted: a step in float64, or a number with a float64's digits",
    "outside": "an element beyond the bound",
    "NaN": "an element that is not finite where float64's is",
    "differs": "another function than torch's float64, another kind of result, or no slope of it",
}
ORDER = (None, *VERDICTS)


class Outcome(NamedTuple):
    """Results and gradients, as they came, what the gradients began with, and what of the results was in float64."""

    results: list
    gradients: list
    cotangents: list
    counts: dict[str, int]


class References(NamedTuple):
    """What four float64 components give, and what they give when operands change by a share of themselves."""

    wide: Outcome
    moved: dict[float, Outcome]
    directions: list[MCTensor]  # what each operand is changed by, over the share


class Held(NamedTuple):
    """What an element may be off by: bits held, bits short of them, and the share by which operands were changed."""

    bits: int
    slack: int
    step: float
    form: tuple[torch.dtype, int]
    is_proved: bool


def severity(finding: Finding) -> tuple[int, float]:
    """To find the worst of several."""
    return ORDER.index(finding.verdict), finding.ratio


def judged(
    found: Outcome,
    reference: References,
    native: Outcome,
    form: tuple,
    gradients: str,
    counts: dict,
    proved: tuple[str, ...],
) -> Finding:
    """The worst of all results and gradients of a call.

    counts: what went through float64. proved: "results" or "gradients" that are known to be right, whatever float64
    makes of them.
    """
    dtype, count = form
    worst = Finding("counted" if counts else "within", 0.0, "", counts)
    bits = count * PRECISION[dtype]
    step = 2.0 ** -min(bits, 106)
    own = (PRECISION[dtype], FIRST_SLACK) if gradients == "first" else (bits, GRADIENT_SLACK)
    in_float64 = {"results": found.counts or reference.wide.counts, "gradients": counts}
    for what, (held, slack) in (("results", (bits, SLACK)), ("gradients", own)):
        held = min(held, COUNTED) if in_float64[what] else held
        lists = [getattr(outcome, what) for outcome in (found, reference.wide, native)]
        if len({len(each) for each in lists}) > 1:
            return Finding("differs", 0.0, f"{[len(each) for each in lists]} {what}", counts)
        for number, (x, wanted, plain) in enumerate(zip(*lists, strict=True)):
            steps = [getattr(reference.moved[by], what)[number] for by in (step, -step)]
            verdict, ratio = compared(
                x, wanted, steps, plain, Held(held, slack, step, form, what in proved), what == "gradients"
            )
            if verdict in ("within", "plain") and in_float64[what]:
                verdict = "counted"
            worst = max(worst, Finding(verdict, ratio, f"{what[:-1]} {number}", counts), key=severity)
    return worst


def compared(x: Any, wanted: Any, steps: Sequence, plain: Any, held: Held, is_gradient: bool) -> tuple[str, float]:
    """A verdict on one result, and how much of its bound it takes."""
    if not isinstance(plain, Tensor) and not (is_gradient and isinstance(x, Tensor)):
        return ("within" if _equal_numbers(x, plain) else "differs"), 0.0
    if is_gradient and not (isinstance(x, Tensor) and isinstance(plain, Tensor) and isinstance(wanted, Tensor)):
        # No gradient is one of zeros.
        zero = all(y is None or not bool(_decoded(y).any()) for y in (x, wanted, plain))
        return ("within" if zero else "differs"), 0.0
    if not isinstance(x, Tensor) or x.shape != plain.shape:
        return "differs", 0.0
    if not x.numel():
        return "within", 0.0
    if plain.is_complex():
        return _compared_complex(x, plain)
    if not plain.is_floating_point():
        return ("within" if not x.is_floating_point() and torch.equal(x, wanted) else "differs"), 0.0
    return _compared_floating(x, wanted, steps, plain, held, is_gradient)


def _equal_numbers(x: Any, plain: Any) -> bool:
    if isinstance(x, Tensor):
        return False
    return x == plain or (x != x and plain != plain) or (isinstance(x, float) and abs(x - plain) <= SAME * abs(plain))


def _compared_complex(x: Tensor, plain: Tensor) -> tuple[str, float]:
    """A complex result has one component: within a plain result's bound, relative to the largest element."""
    if not x.is_complex():
        return "differs", 0.0
    finite = plain.abs().isfinite()
    allowed = 2.0**SLACK * torch.finfo(x.dtype).eps * float(plain[finite].abs().max() if finite.any() else 0.0)
    gap = (x.to(plain.dtype) - plain).abs()[finite]
    if bool((~gap.isfinite()).any()):
        return "NaN", 0.0
    worst = float(gap.max()) if gap.numel() else 0.0
    return ("plain", worst / allowed if allowed else 0.0) if worst <= allowed else ("outside", worst / (allowed or 1))


def _compared_floating(x, wanted, steps, plain, held: Held, is_gradient: bool) -> tuple[str, float]:
    bits, slack = held.bits, held.slack
    if not x.is_floating_point():
        return "differs", 0.0
    if not isinstance(x, MCTensor):
        if not is_gradient:  # a plain operand, moved
            return ("within" if not bool((_wide(x) - _wide(wanted)).decode().nan_to_num().any()) else "cut"), 0.0
        if bits > PRECISION[x.dtype]:  # a plain operand's gradient
            bits, slack = PRECISION[x.dtype], FIRST_SLACK
    elif plain.dtype != torch.float64:  # what the operator itself converts
        bits = min(bits, PRECISION[x.dtype] * len(x.components))
    elif PRECISION[x.dtype] * len(x.components) < PRECISION[held.form[0]] * held.form[1]:
        return "cut", 0.0
    reference, size = _wide(wanted), _decoded(wanted).abs()
    finite = plain.isfinite() & (plain.abs() < _largest(x))
    gap = (_wide(x) - reference).decode().abs()
    if bool((~gap.isfinite() & finite).any()):
        return "NaN", 0.0
    if not bool(finite.any()):
        return "within", 0.0
    slope = torch.minimum(*(_change(each, wanted) for each in steps)) / held.step
    floor = _smallest(x, size[finite])
    lost = (plain.double() - reference.decode()).abs()
    eps = torch.finfo(plain.dtype).eps
    same = lost <= SAME * size + 2.0**8 * eps * (size + slope) + floor
    if not held.is_proved and bool((~same & finite).any()):
        return "differs", 0.0
    if plain.dtype != torch.float64:
        lost = torch.zeros_like(size)
    allowed = 2.0 ** (slack - bits) * (size + slope + _forgiven(lost, size + slope, finite)) + floor
    if held.step >= 2.0**-53:  # computed in float64 itself
        allowed = allowed + 2.0 * lost
    ratio = float((gap / allowed)[finite].nan_to_num(nan=0.0).max())
    return ("outside" if ratio > 1 else "within"), ratio


def _forgiven(lost: Tensor, size: Tensor, finite: Tensor) -> Tensor:
    """What torch's formula loses in float64, in its last bits: it loses as many of a longer number's."""
    largest = lost[finite].max()
    share = (lost / size)[finite & (size > 0)]
    share = share.max() if share.numel() else lost.new_zeros(())
    return torch.minimum(largest, share * size) * 2.0**53


def _largest(x: Tensor) -> float:
    """The range of results that are judged: a scale is a float32."""
    is_scaled = isinstance(x, MCTensor) and x.scale is not None
    return torch.finfo(torch.float32 if is_scaled else x.dtype).max / 4


def _smallest(x: Tensor, size: Tensor) -> float:
    """What is lost near the end of the range; of float16 below a tensor's one scale, and a plain one has none."""
    if x.dtype == torch.float16:
        return 2.0**-30 * float(size.max()) + (0.0 if isinstance(x, MCTensor) else 2.0**-22)
    return torch.finfo(x.dtype).smallest_normal * torch.finfo(x.dtype).eps * 64


def check_reference(
    reference: References, native: Outcome, must_prove: bool = False, has_slope: bool = True
) -> Finding:
    """Whether the reference has a step in float64, or gradients that are not its slope.

    must_prove: "differs" where the slope cannot be told. has_slope: whether the gradients are to be its slope.
    """
    wide, moved, _ = reference
    worst = Finding("within")
    for what in ("results", "gradients"):
        for number, (x, plain) in enumerate(zip(getattr(wide, what), getattr(native, what))):
            if not isinstance(x, MCTensor) or not x.numel():
                continue
            if _is_narrow(x):
                if plain is not None and plain.dtype == torch.float64:
                    return Finding("cut", 0.0, f"{what[:-1]} {number} of four float64 has {len(x.components)}")
                continue  # the operator itself converts
            near, far = (_slope(moved, what, number, by) for by in (LAST, WIDER))
            size = x.decode().abs()
            jumps = far.abs() > 2.0**30 * (size + 1)
            bad = ((near - far).abs() > 2.0**-16 * far.abs() + 2.0**-24 * size) & far.isfinite() & ~jumps
            if bool(bad.any()):
                worst = max(worst, Finding("cut", 0.0, f"{what[:-1]} {number} of four float64"), key=severity)
    agree = _slopes_agree(reference) if has_slope else None
    return max(worst, agree or Finding("differs" if must_prove else "within"), key=severity)


def _is_narrow(x: MCTensor) -> bool:
    """Whether it has fewer digits than four float64."""
    return (x.dtype, len(x.components)) != (torch.float64, 4)


def _slope(moved: dict[float, Outcome], what: str, number: int, by: float) -> Tensor:
    up, down = (getattr(moved[step], what)[number] for step in (by, -by))
    return (_wide(up) - _wide(down)).decode() / (2 * by)


def _slopes_agree(reference: References) -> Finding | None:
    """The results' change along the operands' change, once of the results and once by the gradients, if it is known."""
    wide, moved, directions = reference
    if not wide.gradients or not all(isinstance(x, MCTensor) for x in wide.gradients if x is not None):
        return None
    results = [i for i, x in enumerate(wide.results) if isinstance(x, MCTensor) and not _is_narrow(x)]
    if len(results) != len(wide.results) or len(results) != len(wide.cotangents):
        return None
    terms = [
        (_wide(moved[WIDER].results[i]) - _wide(moved[-WIDER].results[i])) / (2 * WIDER) * _wide(cotangent)
        for i, cotangent in zip(results, wide.cotangents, strict=True)
    ]
    others = [_wide(x) * direction for x, direction in zip(wide.gradients, directions, strict=True) if x is not None]
    left, right = sum(x.sum() for x in terms), sum(x.sum() for x in others)
    size = sum(float(x.abs().sum().decode()) for x in (*terms, *others))
    gap = abs(float((left - right).decode()))
    if not gap < float("inf") or not size < float("inf"):
        return None
    if gap <= 2.0**-50 * size:  # the numbers in torch's formulas are float64
        return Finding("within")
    return Finding("cut" if gap <= SAME * size else "differs", gap / size, "slope of four float64")


def _change(step: Tensor, wanted: Tensor) -> Tensor:
    return (_wide(step) - _wide(wanted)).decode().abs().nan_to_num(nan=0.0, posinf=0.0)


def _wide(x: Tensor) -> MCTensor:
    return MCTensor.encode(x.detach(), 4, torch.float64, gradients="components")


def _decoded(x: Tensor) -> Tensor:
    return x.detach().decode() if isinstance(x, MCTensor) else x.detach()
