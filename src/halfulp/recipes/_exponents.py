"""Proving on a model that gradient exponents change nothing, and merging the sites where they would."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..gradients import AdaptiveGradScaler
from ._agreement import agrees
from ._copies import copy_of, untouched
from ._step import LossOf, Run, difference, in_float64, one_step, pairs, reference

# Random exponents lie in this range; differences of two are far from float32's limits.
LOWEST, HIGHEST = -12, 24
_GLOBAL = "global"


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
        self._state: Mapping[str, Any] | None = None
        self.plain = reference(model, batch, loss)
        self._exact: Run | None = None
        self._exact_known = False
        self.gradients = {name: 0.0 for name, value in self.plain.gradients.items() if value is not None}
        self.values = dict.fromkeys(self.plain.values, 0.0)
        self.wrong: dict[str, None] = {}

    def merged(self, trials: int) -> list[str]:
        """Draw exponents and merge sites until all draws are exact, or every site is merged."""
        baseline = self._run({})
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

    def _judge(self, found: Run, where: str) -> None:
        """Compare a run with the plain one."""
        for name, (wanted, got) in pairs(self.plain, found).items():
            off = difference(wanted, got)
            own = self.gradients if name not in found.values and name not in self.plain.values else self.values
            key = name.removeprefix("gradient ").strip("'") if own is self.gradients else name
            if off or key in own:
                own[key] = max(own.get(key, 0.0), off)
            if off and not agrees(wanted, got, self._exactly(name)):
                self.wrong[f"{name}{where}"] = None

    def _exactly(self, name: str) -> Tensor | None:
        """The result of that name in float64, which is run once and only where something differs."""
        if not self._exact_known:
            self._exact = in_float64(self._model, self._batch, self._loss, self.plain)
            self._exact_known = True
        return None if self._exact is None else pairs(self._exact, self._exact)[name][0]

    def _draw(self, keys: list[str]) -> dict[str, int]:
        kind = {"dtype": torch.int64, "device": "cpu"}
        draws = torch.randint(LOWEST, HIGHEST + 1, (len(keys),), generator=self._generator, **kind)
        return dict(zip(keys, draws.tolist()))

    def _run(self, exponents: dict[str, int], merged: list[str] | None = None) -> Run:
        """A copy's step under these exponents, 0 elsewhere, its gradients unscaled."""
        model = copy_of(self._model)
        scaler = AdaptiveGradScaler(model, mode=self._mode, init_scale=1.0, float32_outputs=False)
        if self._state is not None:
            scaler.load_state_dict(self._state_with(exponents, merged or []))
        scale = scaler.get_scale()
        run = one_step(model, self._batch, self._loss, scaler.scale)
        if self._state is None:
            state = scaler.state_dict()
            self._state = {**state, "sites": dict(state["sites"])}
        gradients = {name: None if value is None else value / scale for name, value in run.gradients.items()}
        return Run(run.values, gradients)

    def _state_with(self, exponents: dict[str, int], merged: list[str]) -> dict[str, Any]:
        state = copy.deepcopy(dict(self._state))
        for key, site in state["sites"].items():
            site["exponent"] = exponents.get(key, 0)
            site["merged"] = site["merged"] or ("not exact by itself" if key in merged else None)
        state["scale"] = 2.0 ** exponents.get(_GLOBAL, 0)
        return state


def _differ(baseline: Run, found: Run) -> bool:
    return any(difference(*both) for both in pairs(baseline, found).values())
