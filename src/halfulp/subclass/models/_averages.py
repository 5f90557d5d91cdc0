"""A warning where torch's AveragedModel keeps its averages in a narrow format."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.optim.swa_utils import AveragedModel

from ...kernels import note_and_warn_once

_NARROW_DTYPES = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)
_hook_handles: list = []


def warn_of_narrow_averages() -> None:
    """Warn from now on where an AveragedModel is made whose averages are kept in a narrow format.

    It holds a deep copy of the model, of plain tensors, whose updates nobody sees. That it takes the copy as its part
    is all that can be seen, by torch's hook for modules that get parts.
    """
    if not _hook_handles:
        _hook_handles.append(register_module_module_registration_hook(_warn_of_averaged_part))


def _warn_of_averaged_part(module: nn.Module, name: str, part: nn.Module | None) -> None:
    if not isinstance(module, AveragedModel) or part is None:
        return
    for parameter in part.parameters():
        payload: Any = getattr(parameter, "payload", parameter)
        if payload.dtype not in _NARROW_DTYPES or hasattr(parameter, "components"):
            continue
        remedy = (
            "halfulp.optim.EMA(model, optimizer=optimizer), or AveragedModel(copy.deepcopy(model).float(), "
            "avg_fn=get_ema_avg_fn())"
            if payload is parameter
            else "AveragedModel(halfulp.scaled.unscalify(copy.deepcopy(model)))"
        )
        note_and_warn_once(
            "lost updates",
            f"AveragedModel keeps its averages in {payload.dtype}, as the model its parameters: an update moves them "
            f"by mostly less than half a last place, which rounding drops; take {remedy}",
        )
        return
