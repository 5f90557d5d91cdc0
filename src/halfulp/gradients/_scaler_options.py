"""Checks and conversions of the options of AdaptiveGradScaler."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from .._messages import a_kind
from ..formats import Format, get
from ..rounding import Nearest, Rounding, get_rounding
from ._controller import Controller
from ._site import HIGHEST, LOWEST, Sites
from .eager._backward import Backward
from .policies._policy import Policy


def models_of(model: nn.Module | Sequence[nn.Module]) -> list[nn.Module]:
    """One model or several, as a list.

    Raises:
        TypeError: something else is among them, or there is none.
    """
    elements: list[object] = list(model) if isinstance(model, (list, tuple)) else [model]
    models = [one for one in elements if isinstance(one, nn.Module)]
    wrong = [one for one in elements if not isinstance(one, nn.Module)]
    if wrong or not models:
        kind = a_kind(wrong[0]) if wrong else "an empty list"
        raise TypeError(f"the model is {kind}: give a torch.nn.Module, or a list of several")
    return models


def controller_of(
    policy: Policy,
    *,
    mode: str,
    start: int,
    format: Format | str | torch.dtype | None,
    rounding: Rounding | str,
    interval: int,
    floor: int,
    ceiling: int,
) -> Controller:
    """The controller of a scaler, with its sites and its backward edges.

    Raises:
        ValueError: an option that is not allowed, or two that exclude each other.
    """
    if mode not in ("function", "module"):
        raise ValueError(f"mode is 'function' or 'module', got {mode!r}")
    if mode == "module" and policy.wants_operands:
        raise ValueError(
            f"policy {policy.name!r} reads the operands of products, which mode='module' does not see: take "
            "mode='function', or policy='amax'"
        )
    if not isinstance(interval, int) or isinstance(interval, bool) or interval < 1:
        raise ValueError(f"interval is a number of iterations, at least 1, got {interval!r}")
    _check_bounds(floor, ceiling)
    if not floor <= start <= ceiling:
        raise ValueError(f"init_scale is 2^{start}, beyond floor={floor} and ceiling={ceiling}")
    rounding = get_rounding(rounding)
    if format is None and rounding != Nearest():
        raise ValueError(
            f"rounding={rounding.name!r} without a format: the tensors' own dtypes round to nearest; give format= too"
        )
    sites = Sites(start, uniform=not policy.per_site)
    backward = Backward(sites, policy, None if format is None else _checked(get(format)), rounding)
    return Controller(backward, interval, floor, ceiling)


def _checked(format: Format) -> Format:
    """Return a format that gradients can have, or raise."""
    if not (format.signed and format.zero):
        lacks = "zero" if format.signed else "negative numbers"
        raise ValueError(f"format {format.name} has no {lacks}, which gradients are: take another, such as 'e5m2'")
    return format


def _check_bounds(floor: int, ceiling: int) -> None:
    if not (isinstance(floor, int) and isinstance(ceiling, int) and LOWEST <= floor <= ceiling <= HIGHEST):
        raise ValueError(
            f"floor and ceiling are integers, {LOWEST} <= floor <= ceiling <= {HIGHEST}, got {floor!r} and {ceiling!r}"
        )


def device_of(models: Sequence[nn.Module]) -> str:
    """The kind of device that the models' parameters are on."""
    return next((p.device.type for one in models for p in one.parameters()), "cpu")
