"""Proving on a model that gradient exponents change nothing, and merging the sites where they would."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..gradients import AdaptiveGradScaler
from ._step import LossOf, difference, one_step, reference

# Random exponents lie in this range; differences of two are far from float32's limits.
LOWEST, HIGHEST = -12, 24


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
    wanted, _ = reference(copy.deepcopy(model), batch, loss)
    mode = "function" if scaler is None else scaler.mode_of(model)
    proof = Proof(model, batch, loss, wanted, mode, torch.Generator().manual_seed(seed))
    merged = proof.merged(trials)
    if scaler is not None:
        scaler.merge(*merged, reason="not exact by itself")
    return {
        "technique": "gradients",
        "gradients": proof.differences,
        "first": None,
        "fallbacks": {},
        "unused": [name for name, value in wanted.items() if value is None],
        "left_alone": [],
        "left_out": None if proof.linear else "the loss scale itself, as the model changes its gradients by their size",
        "trials": trials,
        "seed": seed,
        "merged": merged,
    }


class Proof:
    """A copy of a model with a scaler of its own, run under random exponents.

    Attributes:
        differences: The largest relative difference of each gradient over the draws that counted.
        linear: Whether one scale for all gradients is exact; else none is drawn for the global exponent.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Any,
        loss: LossOf,
        wanted: Mapping[str, Tensor | None],
        mode: str,
        generator: torch.Generator,
    ) -> None:
        self._model = copy.deepcopy(model)
        self._state = copy.deepcopy(self._model.state_dict())
        self._batch, self._loss, self._wanted = batch, loss, wanted
        self._scaler = AdaptiveGradScaler(self._model, mode=mode, init_scale=1.0, float32_outputs=False)
        self._generator = generator
        self.differences: dict[str, float] = {}
        self.linear = True

    def merged(self, trials: int) -> list[str]:
        """Draw exponents and merge sites until all draws are exact, or every site is merged."""
        self._run({})
        keys = [row.site for row in self._scaler.sites().rows[1:]]
        # A model that bounds or rounds its own gradients is not exact under any loss scale.
        self.linear = not any(any(self._run({"global": exponent}).values()) for exponent in (LOWEST, HIGHEST))
        merged: list[str] = []
        self.differences = {}
        for _ in range(trials):
            draw = self._draw(["global", *keys] if self.linear else keys)
            found = self._run(draw)
            if any(found.values()):
                own = [key for key in keys if key not in merged]
                alone = [key for key in own if any(self._run({key: draw[key] or 1}).values())]
                # Where none is wrong by itself, none can be told from the others.
                self._scaler.merge(*(alone or own))
                merged += alone or own
                found = self._run(draw)
            for name, value in found.items():
                self.differences[name] = max(value, self.differences.get(name, 0.0))
        return merged

    def _draw(self, keys: list[str]) -> dict[str, int]:
        kind = {"dtype": torch.int64, "device": "cpu"}
        draws = torch.randint(LOWEST, HIGHEST + 1, (len(keys),), generator=self._generator, **kind)
        return dict(zip(keys, draws.tolist()))

    def _run(self, exponents: dict[str, int]) -> dict[str, float]:
        """Each gradient's difference under these exponents, 0 elsewhere."""
        self._model.load_state_dict(self._state)
        self._scaler.set_exponents(exponents)
        scale = self._scaler.get_scale()
        _, got, _ = one_step(self._model, self._batch, self._loss, self._scaler.scale)
        unscaled = {name: None if value is None else value / scale for name, value in got.items()}
        given = {name for name, value in self._wanted.items() if value is not None}
        return {
            name: difference(self._wanted.get(name), value)
            for name, value in unscaled.items()
            if name in given or value is not None
        }
