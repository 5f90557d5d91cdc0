"""verify: a proof on a given model that a recipe changes nothing in float32, or the operator that does."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from .._messages import a_kind
from ..gradients import AdaptiveGradScaler
from ..gradients.eager._replay import forwards_without_region
from ..kernels import same_bits
from ..mctensor import MCTensor
from ..scaled import ScaledTensor, scalify
from ..subclass import fallbacks
from . import _catalog
from ._recipe import Recipe
from ._training_step import (
    LossOf,
    Run,
    agrees,
    copy_of,
    default_loss,
    difference,
    in_float64,
    one_step,
    pairs,
    reference,
    relative,
    untouched,
)


class Difference(NamedTuple):
    """An operator whose results are not torch's: its name, the module or direction it ran in, and by how much."""

    operator: str
    place: str
    off: float


class OperatorCheck(TorchDispatchMode):
    """Runs torch's operator on the decoded operands beside each operator of scaled tensors.

    Since both have the same operands, what a wrong operator does to those behind it is not held against them, and the
    order in which a backward pass runs does not matter. Views compute nothing and are passed over.

    Attributes:
        unequal: the first operator whose bits differ, if any.
        wrong: those that differ by more than another order of sums explains, in order.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.unequal: Difference | None = None
        self.wrong: list[Difference] = []
        self._module_paths = ["the model"]
        self._handles = []
        for name, module in model.named_modules():
            path = name or "the model"
            self._handles.append(
                module.register_forward_pre_hook(lambda *_, path=path: self._module_paths.append(path))
            )
            self._handles.append(module.register_forward_hook(lambda *_: self._leave(), always_call=True))

    def _leave(self) -> None:
        self._module_paths.pop()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for handle in self._handles:
            handle.remove()

    def __torch_dispatch__(self, operator: Any, types: Any, arguments: tuple = (), options: dict | None = None) -> Any:
        options = options or {}
        given = tree_leaves((arguments, options))
        scaled = any(isinstance(x, ScaledTensor) for x in given)
        if not scaled or operator.is_view or operator.namespace != "aten" or "empty" in operator.name():
            return operator(*arguments, **options)
        # Decoded before the call, which may write into its operands.
        operands = [tree_map(lambda x, to=to: _decoded(x, to), (arguments, options)) for to in _WIDTHS]
        with _same_draws(options.get("generator")) as again:
            results = operator(*arguments, **options)
            wanted = _plainly(operator, operands[0], again)
            got = _floats(results)
            if len(got) == len(wanted):
                wanted, got = list(map(_within, wanted, got)), list(map(_within, got, wanted))
            if len(got) != len(wanted) or not all(map(same_bits, wanted, got)):
                exact = _plainly(operator, operands[1], again)
                self._differs(operator, wanted, got, exact)
        return results

    def _differs(self, operator: Any, wanted: list[Tensor], got: list[Tensor], exact: list[Tensor]) -> None:
        if len(wanted) != len(got) or any(a.shape != b.shape for a, b in zip(wanted, got, strict=True)):
            return  # torch takes no such operands; the results count by what they lead to
        place = "the backward pass" if torch._C._current_graph_task_id() != -1 else self._module_paths[-1]
        found = Difference(str(operator), place, max(map(relative, wanted, got)))
        self.unequal = self.unequal or found
        best: list[Tensor | None] = [None] * len(wanted)
        if len(exact) == len(wanted):
            best[:] = map(_within, exact, wanted)
        if not all(map(agrees, wanted, got, best)):
            self.wrong.append(found)


_WIDTHS = (torch.float32, torch.float64)


# A payload that stands for more may saturate under another scale, or overflow; models take such numbers for "no value".
_LARGEST = 2.0**96


def _within(x: Tensor, other: Tensor) -> Tensor:
    """The tensor, clamped where the other is beyond the bound too, as there any such number will do."""
    if x.shape != other.shape:
        return x
    return torch.where((x.abs() >= _LARGEST) & (other.abs() >= _LARGEST), x.clamp(-_LARGEST, _LARGEST), x)


def _decoded(x: Any, dtype: torch.dtype) -> Any:
    """A copy of the values in another dtype, with the strides of the tensor."""
    if not isinstance(x, Tensor):
        return x
    values = x.detach()
    values = values.decode(torch.float32) if isinstance(values, ScaledTensor) else values.clone()
    return values.to(dtype) if values.dtype == torch.float32 else values


def _plainly(operator: Any, operands: tuple, again: Any) -> list[Tensor]:
    """The floating results of torch's own operator; none where it does not take these operands."""
    arguments, options = operands
    again()
    try:
        return _floats(operator(*arguments, **options))
    except (RuntimeError, TypeError, NotImplementedError):
        return []


def _floats(results: Any) -> list[Tensor]:
    return [_decoded(x, torch.float32) for x in tree_leaves(results) if isinstance(x, Tensor) and x.is_floating_point()]


@contextlib.contextmanager
def _same_draws(generator: torch.Generator | None) -> Iterator[Any]:
    """A block that yields a function to rewind the generators; at its end they are where the first call left them."""
    source = torch.random.default_generator if generator is None else generator
    before = source.get_state()
    after: list[Tensor] = []

    def again() -> None:
        after.append(source.get_state())
        source.set_state(before)

    yield again
    if after:
        source.set_state(after[0])


# Random exponents lie in this range; differences of two are far from float32's limits.
LOWEST, HIGHEST = -12, 24
_GLOBAL = "global"
# So many steps show whether the graph is known: two forward passes are watched, the others are not.
_STEPS = 4
# The number of an iteration that is not measured.
_UNMEASURED = 3


def verify_exponents(
    model: nn.Module, batch: Any, scaler: AdaptiveGradScaler | None, loss: LossOf, trials: int, seed: int
) -> dict[str, Any]:
    """The fields of a Verification.

    Args:
        model: float32, with or without the scaler.
        batch: what it is called with.
        scaler: the model's own, whose sites are merged where they must be; None verifies what a scaler would do.
        loss: from the output to a scalar.
        trials: how many draws of exponents.
        seed: of them.

    Raises:
        ValueError: the scaler is another model's, or of several models.
    """
    mode = "function" if scaler is None else scaler.mode_of(model)
    with untouched(model):
        proof = Proof(model, batch, loss, mode, torch.Generator().manual_seed(seed))
        merged = proof.merged(trials)
        replays = 0 if proof.wrong or mode == "module" else proof.replays(merged)
    if scaler is not None:
        scaler.merge(*merged, reason="not exact by itself")
    wanted = proof.plain.gradients
    return {
        "technique": "gradients",
        "gradients": proof.gradients,
        "values": proof.values,
        "wrong": list(proof.wrong),
        "first": None,
        "fallbacks": {},
        "unused": [name for name, value in wanted.items() if value is None],
        "left_alone": [],
        "left_out": None,
        "trials": trials,
        "seed": seed,
        "merged": merged,
        "replays": replays,
    }


class Proof:
    """Copies of a model, each with a scaler of its own, run under random exponents.

    Each run is compared with one whose exponents are all 0, and that one with the plain model, so that what attaching a
    scaler changes is not taken for what an exponent does.

    Attributes:
        plain: the run without a scaler.
        gradients, values: the largest relative difference from it, over the runs that counted.
        wrong: what differs by more than another order of sums explains, in words, each once.
    """

    def __init__(self, model: nn.Module, batch: Any, loss: LossOf, mode: str, generator: torch.Generator) -> None:
        self._model, self._batch, self._loss, self._mode = model, batch, loss, mode
        self._generator = generator
        self._state: dict[str, Any] | None = None
        self.plain = reference(model, batch, loss)
        self._exact = Exact(model, batch, loss, self.plain)
        self.gradients = {name: 0.0 for name, value in self.plain.gradients.items() if value is not None}
        self.values = dict.fromkeys(self.plain.values, 0.0)
        self.wrong: dict[str, None] = {}

    def merged(self, trials: int) -> list[str]:
        """Draw exponents and merge sites until all draws are exact, or every site is merged."""
        baseline = self._run({})
        assert self._state is not None  # the first run keeps its scaler's
        self._judge(baseline, "")
        keys = [key for key in self._state["sites"] if key != _GLOBAL]
        for exponent in (LOWEST, HIGHEST):
            # A model or a hook that bounds or rounds gradients by their size is right under no other loss scale.
            self._judge(self._run({_GLOBAL: exponent}), f" under a loss scale of 2^{exponent} alone")
        merged: list[str] = []
        linear = not self.wrong
        for _ in range(trials):
            draw = self._draw([_GLOBAL, *keys] if linear else keys)
            found = self._run(draw, merged)
            if _differ(baseline, found):
                own = [key for key in keys if key not in merged]
                alone = [key for key in own if _differ(baseline, self._run({key: draw[key] or 1}, merged))]
                # Where none is wrong by itself, none can be told from the others.
                merged += alone or own
                found = self._run(draw, merged)
            self._judge(found, "")
        return merged

    def replays(self, merged: list[str]) -> int:
        """Check replayed forward passes, which run without a region once their graph is known.

        One copy runs several steps beside a plain one, each under other exponents, which follow the loss besides.
        Returns how many of the forward passes were not watched; none where the graph is not the same each time.
        """
        ours, theirs = copy_of(self._model), copy_of(self._model)
        scaler = AdaptiveGradScaler(ours, mode=self._mode, init_scale=1.0, float32_outputs=False)
        assert self._state is not None  # `merged` ran
        scaler.load_state_dict(self._state)
        binade = int(torch.randint(LOWEST, -LOWEST, (), generator=self._generator, dtype=torch.int64, device="cpu"))
        for step in range(1, _STEPS + 1):
            scaler.set_exponents({})
            # Of two steps one at least then has exponents that are not what they are meant for.
            scaler.load_state_dict(self._unmeasured(scaler.state_dict(), merged, step, binade + step))
            wanted = one_step(theirs, self._batch, self._loss)
            found = self._unscaled(one_step(ours, self._batch, self._loss, scaler.scale), scaler)
            exact = Exact(self._model, self._batch, self._loss, wanted, step)
            self._compare(wanted, found, exact, f" in step {step} of a copy")
        return forwards_without_region(scaler)

    def _unmeasured(self, state: dict[str, Any], merged: list[str], step: int, binade: int) -> dict[str, Any]:
        """A state of random exponents for an iteration that measures nothing, the global one an extreme by turns.

        They are meant for a loss that sends gradients of this binade into the model, and follow the one that there is.
        """
        sites = dict(state["sites"])
        drawn = self._draw([key for key in sites if key not in merged])
        drawn[_GLOBAL] = HIGHEST if step % 2 else LOWEST
        state = self._with(state, drawn, merged)
        state["sites"][_GLOBAL]["reference"] = [binade, 0]
        return {**state, "progress": [_UNMEASURED, 0, False, 0, 0, 0]}

    def _judge(self, found: Run, where: str) -> None:
        """Compare a run with the plain one."""
        self._compare(self.plain, found, self._exact, where)

    def _compare(self, plain: Run, found: Run, exact: Exact, where: str) -> None:
        for name, (wanted, got) in pairs(plain, found).items():
            off = difference(wanted, got)
            own = self.gradients if name not in found.values and name not in plain.values else self.values
            key = name.removeprefix("gradient ").strip("'") if own is self.gradients else name
            if off or key in own:
                own[key] = max(own.get(key, 0.0), off)
            if off and not agrees(wanted, got, exact[name]):
                self.wrong[f"{name}{where}"] = None

    def _draw(self, keys: list[str]) -> dict[str, int]:
        size = (len(keys),)
        draws = torch.randint(LOWEST, HIGHEST + 1, size, generator=self._generator, dtype=torch.int64, device="cpu")
        return dict(zip(keys, draws.tolist()))

    def _run(self, exponents: dict[str, int], merged: list[str] | None = None) -> Run:
        """A copy's step under these exponents, 0 elsewhere, its gradients unscaled."""
        model = copy_of(self._model)
        scaler = AdaptiveGradScaler(model, mode=self._mode, init_scale=1.0, float32_outputs=False)
        if self._state is not None:
            scaler.load_state_dict(self._with(self._state, exponents, merged or []))
        run = one_step(model, self._batch, self._loss, scaler.scale)
        if self._state is None:
            state = scaler.state_dict()
            self._state = {**state, "sites": dict(state["sites"])}
        return self._unscaled(run, scaler)

    def _unscaled(self, run: Run, scaler: AdaptiveGradScaler) -> Run:
        scale = scaler.get_scale()
        gradients = {name: None if value is None else value / scale for name, value in run.gradients.items()}
        return Run(run.values, gradients)

    def _with(self, given: Mapping[str, Any], exponents: dict[str, int], merged: list[str]) -> dict[str, Any]:
        state = copy.deepcopy({**given, "sites": dict(given["sites"])})
        for key, site in state["sites"].items():
            site["exponent"] = exponents.get(key, 0)
            site["merged"] = site["merged"] or ("not exact by itself" if key in merged else None)
        state["scale"] = 2.0 ** exponents.get(_GLOBAL, 0)
        return state


class Exact:
    """A step of a model in float64, run once at first use.

    Args:
        model, batch, loss: as `Proof`'s.
        plain: the step in float32.
        step: which one of a copy it is.
    """

    def __init__(self, model: nn.Module, batch: Any, loss: LossOf, plain: Run, step: int = 1) -> None:
        self._inputs = model, batch, loss, plain, step
        self._results: dict[str, tuple[Tensor | None, Tensor | None]] | None = None

    def __getitem__(self, name: str) -> Tensor | None:
        """Return a result by name; None if the model does not run in float64."""
        if self._results is None:
            found = in_float64(*self._inputs)
            self._results = {} if found is None else pairs(found, found)
        return self._results.get(name, (None, None))[0]


def _differ(baseline: Run, found: Run) -> bool:
    return any(difference(*both) for both in pairs(baseline, found).values())


# Scales between 2^-SPREAD and 2^SPREAD times the measured one.
SPREAD = 12
# How many wrong results a report names.
_SHOWN = 5


@dataclasses.dataclass(frozen=True)
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
    first: tuple[str, str, float] | None
    fallbacks: dict[str, int]
    unused: list[str]
    left_alone: list[str]
    left_out: str | None
    trials: int
    seed: int
    merged: list[str] = dataclasses.field(default_factory=list)
    replays: int | None = None

    @property
    def equal(self) -> int:
        """How many gradients have equal bits."""
        return sum(difference == 0 for difference in self.gradients.values())

    @property
    def passed(self) -> bool:
        """Whether all results equal plain float32's, up to the order of sums, and no operator fell back."""
        return not self.wrong and not self.fallbacks

    def to_dict(self) -> dict[str, Any]:
        """Plain data that JSON can hold; a difference that is not finite is None."""
        data = {**dataclasses.asdict(self), "equal": self.equal, "passed": self.passed}
        for kind in ("gradients", "values"):
            data[kind] = {name: _finite(difference) for name, difference in data[kind].items()}
        data["first"] = [*self.first[:2], _finite(self.first[2])] if self.first else None
        return data

    def __str__(self) -> str:
        worst = max(self.gradients, key=lambda name: self.gradients[name], default=None)
        under = "exponents" if self.technique == "gradients" else "scales"
        said = [f"{self.equal} of {len(self.gradients)} gradients are bit-equal to float32's under random {under}"]
        if worst is not None and self.gradients[worst]:
            said.append(f"the farthest is {worst}, by {self.gradients[worst]:.1e} of its norm")
        if self.wrong:
            more = f" and {len(self.wrong) - _SHOWN} more" if len(self.wrong) > _SHOWN else ""
            said.append(f"not float32's: {', '.join(self.wrong[:_SHOWN])}{more}")
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


def verify(
    model: nn.Module,
    batch: Any,
    recipe: Recipe | str | AdaptiveGradScaler,
    *,
    loss: LossOf | None = None,
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
    if isinstance(recipe, AdaptiveGradScaler):
        _check(model, loss, trials)
        return Verification(**verify_exponents(model, batch, recipe, loss or default_loss(seed), trials, seed))
    recipe = _catalog.get(recipe)
    if recipe.gradient_scale is not None:
        _check(model, loss, trials)
        return Verification(**verify_exponents(model, batch, None, loss or default_loss(seed), trials, seed))
    if not recipe.payload:
        raise NotImplementedError(
            f"recipe {recipe.name!r} rounds by design; verify takes recipes with a payload or a gradient scale, such "
            "as 'scaled-fp16' and 'fp16-adaptive'"
        )
    _check(model, loss, trials)
    with untouched(model):
        return _under_scales(model, batch, recipe, loss or default_loss(seed), trials, seed)


def _under_scales(
    model: nn.Module, batch: Any, recipe: Recipe, loss_of: LossOf, trials: int, seed: int
) -> Verification:
    generator = torch.Generator().manual_seed(seed)
    wanted = reference(model, batch, loss_of)
    exact: Run | None = None
    gradients = {name: 0.0 for name, value in wanted.gradients.items() if value is not None}
    values = dict.fromkeys(wanted.values, 0.0)
    wrong: dict[str, None] = {}
    first: Difference | None = None
    unequal: Difference | None = None
    counts: dict[str, int] = {}
    left: list[str] = []
    for _ in range(trials):
        other = scalify(copy_of(model), torch.float32, rescale="norms", wide="none")
        left = [name for name, p in other.named_parameters() if not isinstance(p, ScaledTensor)]
        _shift(other.parameters(), generator)
        check = OperatorCheck(other)
        got = one_step(other, batch, loss_of, watch=check)
        if exact is None and any(difference(*both) for both in pairs(wanted, got).values()):
            exact = in_float64(model, batch, loss_of, wanted) or _NOWHERE
        _gather(gradients, values, wanted, got)
        operators = [f"operator {one.operator} in {one.place}" for one in check.wrong]
        wrong |= dict.fromkeys([*_wrong(wanted, got, exact or _NOWHERE), *operators])
        first, unequal = first or next(iter(check.wrong), None), unequal or check.unequal
        for name, count in fallbacks(other).items():
            counts[name] = counts.get(name, 0) + count
    left_out = "eight-bit products" if recipe.matmul else None
    return Verification(
        "scaled",
        gradients,
        values,
        list(wrong),
        first or unequal,
        counts,
        _unused(wanted),
        left,
        left_out,
        trials,
        seed,
    )


# Of a model that does not run in float64.
_NOWHERE = Run({}, {})


def _gather(gradients: dict[str, float], values: dict[str, float], wanted: Run, got: Run) -> None:
    """Keep the largest difference of each gradient and value."""
    for kept, ours, theirs in ((gradients, wanted.gradients, got.gradients), (values, wanted.values, got.values)):
        for name in {**ours, **theirs}:
            off = difference(ours.get(name), theirs.get(name))
            if name in kept or off:
                kept[name] = max(kept.get(name, 0.0), off)


def _wrong(wanted: Run, got: Run, exact: Run) -> list[str]:
    """Which values and gradients do not agree."""
    known = pairs(exact, exact)
    return [
        name
        for name, (ours, theirs) in pairs(wanted, got).items()
        if not agrees(ours, theirs, known.get(name, (None,))[0])
    ]


def _check(model: nn.Module, loss: LossOf | None, trials: int) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"the model is {a_kind(model)}: give a torch.nn.Module")
    if loss is not None and not callable(loss):
        raise TypeError(f"the loss is {a_kind(loss)}: give a function, loss=lambda output: ...")
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


def _shift(parameters: Any, generator: torch.Generator) -> None:
    for parameter in parameters:
        data = parameter.data
        if isinstance(data, ScaledTensor):
            parameter.data = _moved(data, generator)


def _moved(x: ScaledTensor, generator: torch.Generator) -> Tensor:
    power = int(torch.randint(-SPREAD, SPREAD + 1, (), generator=generator, dtype=torch.int64, device="cpu"))
    return x.with_scale((x.scale * 2.0**power).clamp(2.0**-126, 2.0**127)).detach()


def _unused(run: Run) -> list[str]:
    return [name for name, value in run.gradients.items() if value is None]


def _finite(difference: float) -> float | None:
    return difference if math.isfinite(difference) else None
