"""Proving on a model that gradient exponents change nothing, and merging the sites where they would."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...gradients import AdaptiveGradScaler
from ...gradients.eager._replay import forwards_without_region
from ._agreement import agrees
from ._copies import copy_of, untouched
from ._training_step import LossOf, Run, difference, in_float64, one_step, pairs, reference

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
