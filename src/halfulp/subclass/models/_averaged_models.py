"""A warning where torch's AveragedModel keeps averages in a narrow format: rounding drops most of its updates."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.optim.swa_utils import AveragedModel

from ...kernels import note_and_warn_once

_NARROW = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)
_handles: list = []


def warn_of_narrow_averages() -> None:
    """Warn from now on where an AveragedModel is made whose averages are kept in a narrow format.

    It holds a deep copy of the model, of plain tensors, whose updates nobody sees. That it takes the copy as its part
    is all that can be seen, by torch's hook for modules that get parts.
    """
    if not _handles:
        _handles.append(register_module_module_registration_hook(_check))


def _check(module: nn.Module, name: str, part: nn.Module | None) -> None:
    if not isinstance(module, AveragedModel) or part is None:
        return
    for parameter in part.parameters():
        payload = getattr(parameter, "payload", parameter)
        if payload.dtype in _NARROW and not hasattr(parameter, "components"):
            remedy = (
                "take halfulp.optim.EMA(model, optimizer=optimizer), or "
                "AveragedModel(copy.deepcopy(model).float(), avg_fn=get_ema_avg_fn())"
                if payload is parameter
                else "take AveragedModel(halfulp.scaled.unscalify(copy.deepcopy(model)))"
            )
            note_and_warn_once(
                "lost updates",
                f"AveragedModel keeps its averages in {payload.dtype}, as the model its parameters: an update moves "
                f"them by mostly less than half a last place, which rounding drops; {remedy}",
            )
            return
