"""GradScaler's setters of growth and backoff, of which policies allow some."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from .._controller import Controller


class GrowthSettings(torch.amp.GradScaler):
    """GradScaler's setters of growth and backoff, for scalers whose policy sets scales."""

    _controller: Controller
    _options: dict[str, Any]

    def set_growth_interval(self, new_interval: int) -> None:
        """Set the number of steps without overflow after which the scale doubles, for policies that count them.

        Raises:
            NotImplementedError: another policy, which grows scales by what it measures.
            ValueError: no whole number of at least 1.
        """
        policy = self._controller.policy
        if not hasattr(policy, "growth_interval"):
            raise NotImplementedError(
                f"policy {policy.name!r} grows scales by what it measures, after no number of steps: take "
                f"policy='dynamic', or Dynamic(growth_interval={new_interval})"
            )
        changes: dict[str, Any] = {"growth_interval": new_interval}
        policy = dataclasses.replace(policy, **changes)
        self._options["policy"] = self._controller.policy = self._controller.backward.policy = policy
        self._growth_interval = new_interval

    def set_growth_factor(self, new_factor: float) -> None:
        """Raise unless the factor is 2, by which scales grow.

        Raises:
            NotImplementedError: another factor, as scales are powers of two, which the policy chooses.
        """
        _check_kept("growth", new_factor, self._growth_factor)

    def set_backoff_factor(self, new_factor: float) -> None:
        """Raise unless the factor is the policy's own.

        Raises:
            NotImplementedError: another factor, as scales are powers of two, which the policy chooses.
        """
        _check_kept("backoff", new_factor, self._backoff_factor)


def _check_kept(name: str, new_factor: float, factor: float) -> None:
    if new_factor != factor:
        raise NotImplementedError(
            f"scales are powers of two, which the policy chooses, got a {name} factor of {new_factor}: keep {factor}, "
            "or give policy= to the scaler"
        )
