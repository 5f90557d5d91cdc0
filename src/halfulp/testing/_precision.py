"""assert_precision_ok: a test that a model trains under a recipe as it does in float32."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import formats, recipes
from .._torch_versions import find_torch_dtype
from ..mctensor import MCTensor
from ..observation import Finding, observe
from ..observation._finding import format_findings
from ..observation.findings import get_finding_kind
from ..recipes import Recipe
from ..recipes._optimizer import emulate_recipe
from ..recipes._plan import check_float32_model
from ..recipes._training_step import (
    GRADIENT_RESULT_PREFIX,
    LossOfOutput,
    StepResults,
    call_model_on_batch,
    check_loss,
    copy_model,
    forbid_model_changes,
    list_named_gradients,
    list_named_outputs,
    make_loss_function,
    run_float32_step,
    use_fixed_random_state,
)
from ..scaled import ScaledTensor

# A scale of 2^16 halves as often before it is 1; iterations that are skipped are no steps.
MAX_SKIPPED_STEPS = 24


class ShortTraining(NamedTuple):
    """The losses, first results and findings of a few training steps."""

    losses: list[float]
    loss_term_norms: list[float]  # of each step in plain float32
    results: dict[str, Tensor]  # outputs and gradients of the first step, by what they are called, in float64
    findings: list[Finding]
    skipped: int  # iterations whose gradients were not finite
    unseen: list[str]  # sentences that say what could not be observed


def run_short_training(
    model: nn.Module,
    batch: Any,
    recipe: Recipe,
    loss_of: LossOfOutput,
    rule: str,
    hyper: dict[str, Any],
    steps: int,
    seed: int,
) -> ShortTraining:
    """Convert a model, which is a copy, and train it on one batch, with the same random numbers in each step."""
    recipes.convert(model, recipe, seed=seed)
    optimizer = recipes.optimizer(model, rule, seed=seed, **hyper)
    scaler = recipes.scaler(recipe, model)
    losses: list[float] = []
    norms: list[float] = []
    first_results: dict[str, Tensor] = {}
    skipped = 0
    seen = observe(model, optimizer, interval=1, scaler=scaler)
    with emulate_recipe(recipe, model) as under, seen:
        while len(losses) < steps and skipped < MAX_SKIPPED_STEPS:
            with use_fixed_random_state():
                output = call_model_on_batch(model, batch)
                loss = under(loss_of)(output)
                check_loss(loss)
                outputs = list_named_outputs(output)
                new_norms = (
                    _collect_loss_term_norms_in_backward(outputs.values()) if recipe == recipes.get("fp32") else []
                )
                (loss if scaler is None else scaler.scale(loss)).backward()
            if scaler is not None:
                scaler.unscale_(optimizer)
            given: StepResults = {} if losses else {**outputs, **list_named_gradients(model)}
            results = {name: _decode_to_float64(x) for name, x in given.items() if x is not None}
            seen.log_loss(_decode_to_float64(loss))
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad()
            if scaler is not None and scaler.last_step is not None and not scaler.last_step.applied:
                skipped += 1
                continue
            first_results = first_results or results
            losses.append(float(_decode_to_float64(loss)))
            norms += new_norms
    if scaler is not None:
        scaler.detach()
    return ShortTraining(losses, norms, first_results, seen.findings, skipped, seen.record.unseen)


def _collect_loss_term_norms_in_backward(outputs: Iterable[Tensor]) -> list[float]:
    """Return a list that backward fills with norms of x dL/dx, whose terms may cancel in L, unlike errors of x."""
    norms: list[float] = []
    for x in outputs:
        if x.requires_grad:
            value = _decode_to_float64(x)
            x.register_hook(lambda grad, value=value: norms.append(float((value * _decode_to_float64(grad)).norm())))
    return norms


def _decode_to_float64(x: Tensor) -> Tensor:
    x = x.detach()
    return x.decode(torch.float64) if isinstance(x, ScaledTensor | MCTensor) else x.to(torch.float64, copy=True)


# Twice what the worst result of five kinds of models that train well is commonly off by, some 16 eps of the format that
# the recipe computes in: tests/testing/test_precision.py.
TOLERANCE_IN_EPS = 32
# float32's own runs differ by so much, or a little more.
MIN_TOLERANCE = 1e-4
MAX_TOLERANCE = 0.5
# How much farther than its twin, a float32 run from a start that differs by 1e-7, a run may be for that reason alone.
ALLOWED_MULTIPLE_OF_TWIN_DIFFERENCE = 4
# A gradient that is 0 but for rounding is measured beside the others: by this share of their root mean square.
GRADIENT_FLOOR_SHARE_OF_RMS = 0.1
# Losses that are small differences are measured beside their terms: by a share that makes an allowance of 32 eps
# one of 4 eps of the terms.
LOSS_FLOOR_SHARE_OF_TERMS = 0.125
_MAX_SHOWN_DIFFERENCES = 8


class PrecisionError(AssertionError):
    """A model does not train under a recipe as in float32; the message says where, and what to do.

    Attributes:
        check: what was found.
    """

    def __init__(self, check: PrecisionCheck) -> None:
        super().__init__(str(check))
        self.check = check


@dataclasses.dataclass(frozen=True)
class DifferenceFromFloat32:
    """The distance of a result of a recipe's run from float32's.

    Attributes:
        name: "gradient 'head.weight'", "output 0", "losses of 8 steps".
        relative: norm of the difference over that of float32's; infinite where it is not finite. Losses whose terms
            cancel are measured by the norm of the terms, gradients that are 0 but for rounding beside the others.
        allowed: the tolerance, and four times the difference of float32's own twin.
    """

    name: str
    relative: float
    allowed: float


@dataclasses.dataclass(frozen=True)
class PrecisionCheck:
    """The findings of `assert_precision_ok`.

    Attributes:
        recipe: name of the recipe.
        setting: the model's class, the optimizer and the steps, in words.
        findings: above a note, the worst first, without those that are accepted.
        notes: the others.
        differences: of losses, outputs and gradients, the worst first.
        tolerance: that differences were held to.
        unseen: sentences that say what could not be observed.
    """

    recipe: str
    setting: str
    findings: tuple[Finding, ...]
    notes: tuple[Finding, ...]
    differences: tuple[DifferenceFromFloat32, ...]
    tolerance: float
    unseen: tuple[str, ...]

    @property
    def too_far(self) -> tuple[DifferenceFromFloat32, ...]:
        """The differences beyond what is allowed."""
        return tuple(one for one in self.differences if not one.relative <= one.allowed)

    @property
    def passed(self) -> bool:
        """Whether nothing above a note was found and no difference is too large."""
        return not self.findings and not self.too_far

    def __str__(self) -> str:
        head = f"{self.recipe} {'passes' if self.passed else 'FAILS'}: {self.setting}"
        lines = [head, *(format_findings(self.findings) if self.findings else ())]
        far = self.too_far
        if far:
            lines.append(f"farther from float32 than {self.tolerance:.2g} of its norm:")
            lines += [f"         {one.name}: {one.relative:.2g}" for one in far[:_MAX_SHOWN_DIFFERENCES]]
            if (hidden := len(far) - _MAX_SHOWN_DIFFERENCES) > 0:
                lines.append(f"         and {hidden} more")
            lines.append(
                f"{'':<9}cure: keep the modules named first in float32 (recipe.replace(float32=...)), take a recipe "
                "with more digits, or give tolerance= if that much is meant"
            )
        elif self.differences:
            lines.append(f"farthest from float32: {self.differences[0].name}, by {self.differences[0].relative:.2g}")
        return "\n".join([*lines, *(f"not observed: {said}" for said in self.unseen)])


def assert_precision_ok(
    model: nn.Module,
    batch: Any,
    recipe: Recipe | str,
    *,
    loss: LossOfOutput | None = None,
    rule: str = "AdamW",
    lr: float = 1e-3,
    steps: int = 8,
    tolerance: float | None = None,
    accept: Collection[str] = (),
    seed: int = 0,
    **hyper: Any,
) -> PrecisionCheck:
    """Raise unless a model trains under a recipe as it does in float32, with what is wrong, where, and the cure.

    Copies of the model take a few steps on one batch: in float32, in float32 from a start that differs by 1e-7 (the
    twin), and under the recipe, with its weight updates, states and scaler, observed in every step (`hu.observe`).
    The check fails on a finding above a note, and where the losses, the first step's outputs or a gradient differ from
    float32's by more than the tolerance and four times the twin's difference. The model, its gradients and buffers and
    all random states stay as they are.

    Args:
        model: with float32 parameters, in the mode (train or eval) that is to be tested.
        batch: what the model is called with: a tensor, a tuple of arguments or a dict of keyword arguments.
        recipe: a Recipe or the name of one.
        loss: from the model's output to a scalar; by default the output's own ``loss``, or the sum of all floating
            outputs, each element times a fixed random weight.
        rule: the optimizer: "SGD", "Adam", "AdamW", "Lion" or one of your own.
        lr: the learning rate. Give the smallest that your run trains with: it decides which updates rounding loses.
        steps: how many are taken, at least 2.
        tolerance: the largest difference, as a share of the norm of float32's result; by default 32 times the relative
            spacing of the numbers that the recipe computes with, from 0.0001 to 0.5.
        accept: codes of findings that are known and meant, such as "updates-lost".
        seed: of the recipe's stochastic rounding.
        **hyper: the optimizer's other hyper-parameters.

    Returns:
        What was found, for tests of its numbers.

    Raises:
        PrecisionError: an AssertionError, which prints the findings and differences.
        ValueError: an unknown recipe, rule or code, fewer than 2 steps, a tolerance that is not above 0, a model that
            is not float32 or cannot be copied, or whose loss or gradients are not finite in float32.
        TypeError: no module, a loss that is no function or gives no tensor.

    >>> from collections import OrderedDict
    >>> _ = torch.manual_seed(0)
    >>> layers = OrderedDict(up=nn.Linear(16, 64), norm=nn.LayerNorm(64), head=nn.Linear(64, 4))
    >>> model, batch = nn.Sequential(layers), torch.randn(32, 16)
    >>> check = assert_precision_ok(model, batch, "bf16-kahan", lr=1e-4)
    >>> try:
    ...     assert_precision_ok(model, batch, recipes.get("bf16").replace(float32=()), lr=1e-4)
    ... except AssertionError as error:
    ...     print(*str(error).splitlines()[:3], sep="\\n")
    bf16 FAILS: Sequential, 8 steps of AdamW at lr 0.0001
    7 findings, of one cause:
    error    updates-lost: up, head, norm lose up to 100% of their updates: bf16 weights at lr 0.0001
    """
    recipe = recipes.get(recipe)
    check_float32_model(model)
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 2:
        raise ValueError(f"steps={steps!r}: give a number of steps, 2 or more")
    if tolerance is not None and not tolerance > 0:
        raise ValueError(f"tolerance={tolerance!r}: give a share of float32's norm, above 0")
    accepted = {accept} if isinstance(accept, str) else set(accept)
    for code in accepted:
        get_finding_kind(code)
    tolerance = compute_default_tolerance(recipe) if tolerance is None else float(tolerance)
    loss_of = make_loss_function(loss, seed)
    hyper = {"lr": lr, **hyper}
    with torch.inference_mode(False), torch.enable_grad(), use_fixed_random_state(), forbid_model_changes(model):
        run_float32_step(model, batch, loss_of)
        plain, twin, narrow = (
            run_short_training(copy_model(model), batch, one, loss_of, rule, hyper, steps, seed)
            for one in (recipes.get("fp32"), recipes.get("fp32-twin"), recipe)
        )
    bad = tuple(one for one in narrow.findings if one.severity != "note" and one.code not in accepted)
    skipped = f", {narrow.skipped} skipped" if narrow.skipped else ""
    found = PrecisionCheck(
        recipe.name,
        f"{type(model).__name__}, {steps} steps of {rule} at lr {lr:g}{skipped}",
        bad,
        tuple(one for one in narrow.findings if one not in bad),
        tuple(_rank_differences_from_float32(plain, twin, narrow, tolerance)),
        tolerance,
        tuple(narrow.unseen),
    )
    if not found.passed:
        raise PrecisionError(found)
    return found


def compute_default_tolerance(recipe: Recipe) -> float:
    """Return 32 times the relative spacing of the numbers that a recipe computes with, from 0.0001 to 0.5.

    >>> compute_default_tolerance(recipes.get("bf16")), compute_default_tolerance(recipes.get("fp16-master"))
    (0.25, 0.03125)
    """
    names = [recipe.emulate, recipe.gradient_format, recipe.payload, recipe.param_dtype]
    if recipe.matmul == "fp8":
        names.append("e5m2")
    spacing = max((formats.get(find_torch_dtype(name) or name).eps for name in names if name), default=0.0)
    if recipe.components:
        spacing = spacing**recipe.components
    return min(MAX_TOLERANCE, max(MIN_TOLERANCE, TOLERANCE_IN_EPS * spacing))


def _rank_differences_from_float32(
    plain: ShortTraining, twin: ShortTraining, narrow: ShortTraining, tolerance: float
) -> list[DifferenceFromFloat32]:
    """Return the differences of a run from float32's, the one that is farthest beyond its allowance first."""
    losses = (torch.tensor(run.losses, dtype=torch.float64, device="cpu") for run in (plain, twin, narrow))
    floor = LOSS_FLOOR_SHARE_OF_TERMS * math.hypot(*plain.loss_term_norms)
    rows: list[tuple[Any, ...]] = [(f"losses of {len(plain.losses)} steps", *losses, floor)]
    gradients = [x for name, x in plain.results.items() if name.startswith(GRADIENT_RESULT_PREFIX)]
    elements = sum(x.numel() for x in gradients)
    typical = math.sqrt(sum(float(x.square().sum()) for x in gradients) / max(1, elements))
    for name, wanted in plain.results.items():
        floor = (
            GRADIENT_FLOOR_SHARE_OF_RMS * typical * math.sqrt(wanted.numel())
            if name.startswith(GRADIENT_RESULT_PREFIX)
            else 0.0
        )
        rows.append((name, wanted, twin.results[name], narrow.results.get(name), floor))
    found = [
        DifferenceFromFloat32(
            name,
            _compute_relative_difference(wanted, mine, floor),
            tolerance + ALLOWED_MULTIPLE_OF_TWIN_DIFFERENCE * _compute_relative_difference(wanted, other, floor),
        )
        for name, wanted, other, mine, floor in rows
    ]
    return sorted(found, key=lambda one: -one.relative / one.allowed)


def _compute_relative_difference(wanted: Tensor, got: Tensor | None, floor: float) -> float:
    if got is None or got.shape != wanted.shape or not bool(got.isfinite().all()):
        return math.inf
    scale = max(float(wanted.norm()), floor)
    off = float((got - wanted).norm())
    return off / scale if scale else (math.inf if off else 0.0)
