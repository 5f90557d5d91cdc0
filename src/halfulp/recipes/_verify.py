"""verify: a proof on a given model that a recipe changes nothing in float32, or the operator that does."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from .._messages import name_type
from ..gradients import AdaptiveGradScaler
from ..gradients._site import GLOBAL_SITE_KEY
from ..gradients.eager._replay import count_replays
from ..mctensor import MCTensor
from ..scaled import ScaledTensor, scalify
from ..subclass import fallbacks
from . import _recipe as _catalog
from ._recipe import Recipe
from ._training_step import (
    GRADIENT_RESULT_PREFIX,
    LossOfOutput,
    OperatorCheckMode,
    OperatorDifference,
    StepResults,
    copy_model,
    forbid_model_changes,
    is_close_to_float32,
    make_loss_function,
    measure_result_difference,
    pair_results_by_name,
    run_float32_step,
    run_float64_step,
    run_one_step,
    select_gradient_results,
)

# Scales between 2^-SPREAD and 2^SPREAD times the measured one.
MAX_RANDOM_SCALE_EXPONENT = 12
# How many wrong results a report names.
_MOST_SHOWN_RESULTS = 5


# Random exponents lie in this range; differences of two are far from float32's limits.
MIN_EXPONENT, MAX_EXPONENT = -12, 24
# So many steps show whether the graph is known: two forward passes are watched, the others are not.
_STEPS_OF_REPLAY_CHECK = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verification:
    """The result of `verify`.

    Attributes:
        technique: What was verified: "scaled" or "gradients".
        gradients: Relative difference to plain float32 of each parameter that has a gradient; 0 means equal bits.
        values: The same of the loss, the floating outputs and the floating buffers.
        wrong: Which gradients, values and operators differ by more than another order of sums explains.
        first: The first operator that is wrong, or else the first whose bits are not those of torch's own on the same
            operands: its name, the module or direction it ran in, and by how much; or None.
        fallbacks: Operators without a rule, and how often they ran.
        unused: Parameters that train but have no gradient in plain float32; nothing was compared there.
        left_alone: Parameters that the recipe does not change.
        left_out: What the recipe rounds by design, which is no part of the run: "eight-bit products"; or None.
        trials: How often it ran, each time under other random scales or exponents.
        seed: Of the scales.
        merged: Gradient sites that were not exact by themselves, and now follow the global exponent.
        replays: How many of the forward passes under random exponents were not watched, as their graph was known, like
            most of a training's; None under scales, and 0 where it is not the same from pass to pass.
    """

    technique: str
    gradients: dict[str, float]
    values: dict[str, float]
    wrong: list[str]
    first: tuple[str, str, float] | None = None
    fallbacks: dict[str, int] = dataclasses.field(default_factory=dict)
    unused: list[str]
    left_alone: list[str] = dataclasses.field(default_factory=list)
    left_out: str | None = None
    trials: int
    seed: int
    merged: list[str] = dataclasses.field(default_factory=list)
    replays: int | None = None

    @property
    def equal_gradient_count(self) -> int:
        """The number of gradients that have equal bits."""
        return sum(difference == 0 for difference in self.gradients.values())

    @property
    def passed(self) -> bool:
        """Whether all results equal plain float32's, up to the order of sums, and no operator fell back."""
        return not self.wrong and not self.fallbacks

    def to_dict(self) -> dict[str, Any]:
        """Return plain data that JSON can hold; a difference that is not finite is None."""
        data = {**dataclasses.asdict(self), "equal": self.equal_gradient_count, "passed": self.passed}
        for kind in ("gradients", "values"):
            data[kind] = {name: _replace_nonfinite(difference) for name, difference in data[kind].items()}
        data["first"] = [*self.first[:2], _replace_nonfinite(self.first[2])] if self.first else None
        return data

    def __str__(self) -> str:
        worst = max(self.gradients, key=lambda name: self.gradients[name], default=None)
        under = "exponents" if self.technique == "gradients" else "scales"
        equal = f"{self.equal_gradient_count} of {len(self.gradients)}"
        said = [f"{equal} gradients are bit-equal to float32's under random {under}"]
        if worst is not None and self.gradients[worst]:
            said.append(f"the farthest is {worst}, by {self.gradients[worst]:.1e} of its norm")
        if self.wrong:
            more = f" and {len(self.wrong) - _MOST_SHOWN_RESULTS} more" if len(self.wrong) > _MOST_SHOWN_RESULTS else ""
            said.append(f"not float32's: {', '.join(self.wrong[:_MOST_SHOWN_RESULTS])}{more}")
        if self.first:
            operator, place, difference = self.first
            said.append(f"the first operator that differs is {operator} in {place}, by {difference:.1e}")
        for name, count in self.fallbacks.items():
            said.append(f"{name} has no rule and ran on decoded values {count} times")
        if self.unused:
            said.append(f"without a gradient: {', '.join(self.unused)}")
        if self.left_alone:
            said.append(f"left alone: {', '.join(self.left_alone)}")
        if self.merged:
            said.append(f"merged into the global exponent, as not exact by themselves: {', '.join(self.merged)}")
        if self.passed and self.replays == 0:
            said.append("its graph is another at each pass or has parts that must be watched, as in every pass here")
        head = "passed" if self.passed else "FAILED"
        if self.left_out:
            head += f" ({self.left_out} left out, as no part of the proof)"
        return f"{head}: " + "; ".join(said)


class VerificationRuns:
    """Runs of copies of a model, compared with a plain one: the largest relative differences, and what is wrong."""

    def __init__(self, model: nn.Module, batch: Any, loss: LossOfOutput, seed: int) -> None:
        self._model, self._batch, self._loss, self._seed = model, batch, loss, seed
        self._generator = torch.Generator().manual_seed(seed)
        self.float32_results = run_float32_step(model, batch, loss)
        self._get_float64_results = functools.cache(lambda: run_float64_step(model, batch, loss, self.float32_results))
        self.difference_by_result = {name: 0.0 for name, value in self.float32_results.items() if value is not None}
        # What differs by more than another order of sums explains, in words, each once.
        self.wrong: dict[str, None] = {}
        # Of the gradient sites, in the first run's order.
        self._site_keys: list[str] = []

    def compare_with_float32(
        self, found: StepResults, where: str = "", plain: StepResults | None = None, step: int = 1
    ) -> None:
        """Compare a run with plain float32's: that of the first step, or one that is given."""
        plain, exact = plain or self.float32_results, self._get_float64_results
        if plain is not self.float32_results:
            exact = functools.cache(lambda: run_float64_step(self._model, self._batch, self._loss, plain, step))
        for name, wanted, got in pair_results_by_name(plain, found):
            off = measure_result_difference(wanted, got)
            if off or name in self.difference_by_result:
                self.difference_by_result[name] = max(self.difference_by_result.get(name, 0.0), off)
            if off and not is_close_to_float32(wanted, got, (exact() or {}).get(name)):
                self.wrong[f"{name}{where}"] = None

    def make_verification(self, technique: str, trials: int, **fields: Any) -> Verification:
        """Return a Verification of the runs, with given fields that the runs do not determine."""
        own = {
            name: _get_parameter_name_of_result(name)
            for name in self.difference_by_result
            if name.startswith(GRADIENT_RESULT_PREFIX)
        }
        return Verification(
            technique=technique,
            gradients={name: self.difference_by_result[result] for result, name in own.items()},
            values={name: off for name, off in self.difference_by_result.items() if name not in own},
            wrong=list(self.wrong),
            unused=[
                _get_parameter_name_of_result(name)
                for name, value in select_gradient_results(self.float32_results).items()
                if value is None
            ],
            trials=trials,
            seed=self._seed,
            **fields,
        )

    def draw_random_integers(self, low: int, high: int, count: int) -> list[int]:
        """Draw random integers from low to high, both included."""
        drawn = torch.randint(low, high + 1, (count,), generator=self._generator, dtype=torch.int64, device="cpu")
        return drawn.tolist()

    def run_under_scales(self, recipe: Recipe, trials: int) -> Verification:
        """Run copies with scaled parameters under so many draws of scales, each operator beside torch's own."""
        wrong: list[OperatorDifference] = []
        unequal: OperatorDifference | None = None
        counts: Counter[str] = Counter()
        left: list[str] = []
        for _ in range(trials):
            other = scalify(copy_model(self._model), torch.float32, rescale="norms", wide="none")
            left = [name for name, p in other.named_parameters() if not isinstance(p, ScaledTensor)]
            for parameter in other.parameters():
                if isinstance(values := parameter.data, ScaledTensor):
                    (power,) = self.draw_random_integers(-MAX_RANDOM_SCALE_EXPONENT, MAX_RANDOM_SCALE_EXPONENT, 1)
                    scale = (values.scale * 2.0**power).clamp(2.0**-126, 2.0**127)
                    parameter.data = values.with_scale(scale).detach()
            check = OperatorCheckMode(other)
            self.compare_with_float32(run_one_step(other, self._batch, self._loss, watch=check))
            self.wrong |= dict.fromkeys(
                f"operator {operator} in {place}" for operator, place, _ in check.wrong_operators
            )
            wrong, unequal = wrong + check.wrong_operators, unequal or check.first_difference
            counts.update(fallbacks(other))
        left_out, first = "eight-bit products" if recipe.matmul else None, wrong[0] if wrong else unequal
        more: dict[str, Any] = {"fallbacks": dict(counts), "left_alone": left, "left_out": left_out}
        return self.make_verification("scaled", trials, first=first, **more)

    def merge_sites_until_exact(self, trials: int) -> list[str]:
        """Draw exponents, for copies with a scaler, and merge sites until all draws are exact or every site is merged.

        Each run is compared with one whose exponents are all 0, and that one with the plain model, so that what
        attaching a scaler changes is not taken for what an exponent does.
        """
        baseline = self._run_scaled_step({})
        self.compare_with_float32(baseline)
        keys = self._site_keys
        for exponent in (MIN_EXPONENT, MAX_EXPONENT):
            # A model or a hook that bounds or rounds gradients by their size is right under no other loss scale.
            found = self._run_scaled_step({GLOBAL_SITE_KEY: exponent})
            self.compare_with_float32(found, f" under a loss scale of 2^{exponent} alone")
        merged: list[str] = []
        linear = not self.wrong
        for _ in range(trials):
            draw = self._draw_exponents([GLOBAL_SITE_KEY, *keys] if linear else keys)
            found = self._run_scaled_step(draw, merged)
            if has_different_results(baseline, found):
                own = [key for key in keys if key not in merged]
                runs = {key: self._run_scaled_step({key: draw[key] or 1}, merged) for key in own}
                alone = [key for key, run in runs.items() if has_different_results(baseline, run)]
                # Where none is wrong by itself, none can be told from the others.
                merged += alone or own
                found = self._run_scaled_step(draw, merged)
            self.compare_with_float32(found)
        return merged

    def verify_replayed_passes(self, merged: list[str]) -> int:
        """Check replayed forward passes, and return how many were not watched, as their graph was known.

        One copy runs several steps beside a plain one, each under other exponents, which follow the loss besides.
        """
        ours, theirs = copy_model(self._model), copy_model(self._model)
        scaler = self._make_scaler(ours, merged)
        (binade,) = self.draw_random_integers(MIN_EXPONENT, -MIN_EXPONENT - 1, 1)
        for step in range(1, _STEPS_OF_REPLAY_CHECK + 1):
            drawn = self._draw_exponents([key for key in (GLOBAL_SITE_KEY, *self._site_keys) if key not in merged])
            drawn[GLOBAL_SITE_KEY] = MAX_EXPONENT if step % 2 else MIN_EXPONENT
            scaler.set_exponents(drawn)
            # What is measured is watched.
            scaler._controller.backward.is_measuring = False
            # Meant for a loss that sends gradients of this binade into the model, the exponents follow the one that
            # there is: of two steps one at least then has exponents that are not what they are meant for.
            scaler._controller.sites.global_site.reference_binade = binade + step
            wanted = run_one_step(theirs, self._batch, self._loss)
            found = self._unscale_gradients(run_one_step(ours, self._batch, self._loss, scaler.scale), scaler)
            self.compare_with_float32(found, f" in step {step} of a copy", wanted, step)
        return count_replays(scaler)

    def _draw_exponents(self, keys: Sequence[str]) -> dict[str, int]:
        return dict(zip(keys, self.draw_random_integers(MIN_EXPONENT, MAX_EXPONENT, len(keys))))

    def _run_scaled_step(self, exponents: dict[str, int], merged: Sequence[str] = ()) -> StepResults:
        """Return a copy's step under these exponents, 0 elsewhere, its gradients unscaled."""
        model = copy_model(self._model)
        scaler = self._make_scaler(model, merged)
        scaler.set_exponents(exponents)
        run = run_one_step(model, self._batch, self._loss, scaler.scale)
        self._site_keys = self._site_keys or [row.site for row in scaler.sites() if row.site != GLOBAL_SITE_KEY]
        return self._unscale_gradients(run, scaler)

    def _make_scaler(self, model: nn.Module, merged: Sequence[str]) -> AdaptiveGradScaler:
        """Return a scaler of a copy that knows the sites before its first forward pass."""
        scaler = AdaptiveGradScaler(model, init_scale=1.0, float32_outputs=False)
        for key in self._site_keys:
            scaler._controller.sites.get_or_create_site(key)
        scaler.merge_into_global_site(*merged, reason="not exact by itself")
        return scaler

    def _unscale_gradients(self, run: StepResults, scaler: AdaptiveGradScaler) -> StepResults:
        scale = scaler.get_scale()
        return run | {
            name: None if value is None else value / scale for name, value in select_gradient_results(run).items()
        }


def _get_parameter_name_of_result(name: str) -> str:
    """Return the name of the parameter whose gradient is called so."""
    return name.removeprefix(GRADIENT_RESULT_PREFIX).strip("'")


def has_different_results(baseline: StepResults, found: StepResults) -> bool:
    return any(measure_result_difference(wanted, got) for _, wanted, got in pair_results_by_name(baseline, found))


def verify(
    model: nn.Module,
    batch: Any,
    recipe: Recipe | str | AdaptiveGradScaler,
    *,
    loss: LossOfOutput | None = None,
    trials: int = 2,
    seed: int = 0,
) -> Verification:
    """Compare a model's gradients with plain float32's, under random power-of-two scales or gradient exponents.

    What a recipe changes is the representation; in float32 its values must be float32's own, under any scales. Copies
    of the model run one forward and backward pass each: plain, and with every parameter (`halfulp.scalify`) or every
    gradient site (`halfulp.AdaptiveGradScaler`) under a random scale; of gradient sites one copy runs four steps
    besides, as forward passes whose graph is known are not watched. The model itself, its gradients and torch's random
    state stay as they are.

    Args:
        model: with float32 parameters, in the mode (train or eval) that is to be verified.
        batch: what the model is called with: a tensor, a tuple of arguments or a dict of keyword arguments.
        recipe: one with a payload or a gradient scale, or its name; or the model's AdaptiveGradScaler, in which sites
            that turn out not to be exact by themselves are merged into the global one.
        loss: from the model's output to a scalar; by default the output's own ``loss``, or the sum of all floating
            outputs, each element times a fixed random weight.
        trials: how many draws of scales, at least 1.
        seed: of the scales and weights.

    Raises:
        ValueError: an unknown recipe, trials < 1, a model without float32 parameters or with tensors of halfulp's in
            their place, a loss that is no scalar, or nothing to compare with: in plain float32 no parameter has a
            gradient, or the loss or a gradient is not finite.
        TypeError: a model that is no nn.Module, a loss that is no function or gives no tensor.
        NotImplementedError: a recipe that changes values by design, so that there is nothing to prove.

    >>> print(verify(torch.nn.Linear(3, 2), torch.ones(4, 3), "scaled-fp16"))
    passed: 2 of 2 gradients are bit-equal to float32's under random scales
    """
    scaler = recipe if isinstance(recipe, AdaptiveGradScaler) else None
    recipe = _catalog.get("fp16-adaptive" if isinstance(recipe, AdaptiveGradScaler) else recipe)
    if recipe.gradient_scale is None and not recipe.payload:
        raise NotImplementedError(
            f"recipe {recipe.name!r} rounds by design; verify takes recipes with a payload or a gradient scale, such "
            "as 'scaled-fp16' and 'fp16-adaptive'"
        )
    _check_model_and_trials(model, trials)
    loss_of = make_loss_function(loss, seed)
    if scaler is not None and [one() for one in scaler._models] != [model]:
        raise ValueError("the scaler is not this model's alone: make one for the model, AdaptiveGradScaler(model)")
    with forbid_model_changes(model):
        proof = VerificationRuns(model, batch, loss_of, seed)
        if recipe.payload:
            return proof.run_under_scales(recipe, trials)
        merged = proof.merge_sites_until_exact(trials)
        replays = 0 if proof.wrong else proof.verify_replayed_passes(merged)
    found = proof.make_verification("gradients", trials, merged=merged, replays=replays)
    if scaler is not None:
        scaler.merge_into_global_site(*found.merged, reason="not exact by itself")
    return found


def _check_model_and_trials(model: nn.Module, trials: int) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"the model is {name_type(model)}: give a torch.nn.Module")
    if trials < 1:
        raise ValueError(f"trials={trials}: give at least 1, as no trial proves nothing")
    for name, parameter in model.named_parameters():
        if isinstance(parameter, (ScaledTensor, MCTensor)):
            kind, back = type(parameter).__name__, "halfulp.scaled.unscalify(copy.deepcopy(model))"
            if isinstance(parameter, MCTensor):
                back = "halfulp.mctensor.single_component(copy.deepcopy(model), torch.float32)"
            raise ValueError(f"parameter {name!r} is a {kind}: verify takes the plain float32 model, {back}")
    if not any(parameter.dtype == torch.float32 for parameter in model.parameters()):
        raise ValueError("the model has no float32 parameters: nothing to verify")


def _replace_nonfinite(difference: float) -> float | None:
    return difference if math.isfinite(difference) else None
