"""The running statistics of batch normalizations, beside float64 ones that follow the same batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ....kernels import in_float64
from ..._record import AverageRecord
from .._notebook import Notebook
from ..updates._realised import add_changes


@dataclass(slots=True)
class _Statistics:
    """Running statistics at the beginning of a step, and float64 shadows that follow the batches."""

    before: dict[str, torch.Tensor]
    shadow: dict[str, torch.Tensor]
    tracked: int
    calls: int = 0


class RunningStatistics:
    """Watches the running mean and variance of batch normalizations.

    Args:
        book: what is written to.
        modules: modules and their names.
    """

    def __init__(self, book: Notebook, modules: dict[nn.Module, str]) -> None:
        self.book = book
        self._modules = {module: name for module, name in modules.items() if _is_followed(module)}
        self._shadows: dict[nn.Module, _Statistics] = {}

    def follows(self, module: nn.Module) -> bool:
        """Return whether a module is one whose statistics are watched."""
        return module in self._modules

    def begin(self) -> None:
        """Copy the statistics as they are before the step's batches."""
        self._shadows = {}
        for module in self._modules:
            before = {key: getattr(module, key).detach().cpu().double() for key in ("running_mean", "running_var")}
            shadow = {key: value.clone() for key, value in before.items()}
            self._shadows[module] = _Statistics(before, shadow, _batches(module))

    def follow(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Let the shadows take up a batch."""
        held = self._shadows.get(module)
        if held is None or not module.training or not inputs or not isinstance(inputs[0], torch.Tensor):
            return
        x = in_float64(inputs[0].detach())
        over = [d for d in range(x.dim()) if d != 1]
        count = x.numel() / max(1, x.shape[1])
        if count < 2:
            return
        variance, mean = torch.var_mean(x, over, correction=1)
        held.calls += 1
        momentum: Any = module.momentum
        share = 1 / (held.tracked + held.calls) if momentum is None else float(momentum)
        for key, batch in (("running_mean", mean), ("running_var", variance)):
            held.shadow[key] += share * (batch.cpu() - held.shadow[key])

    def end(self) -> None:
        """Compare the statistics with their shadows, where these saw every batch."""
        held, self._shadows = self._shadows, {}
        for module, one in held.items():
            if not one.calls or _batches(module) - one.tracked != one.calls:
                continue
            momentum: Any = module.momentum
            for key, before in one.before.items():
                name = ".".join(part for part in (self._modules[module], key) if part)
                now = getattr(module, key).detach()
                retention = None if momentum is None else 1 - float(momentum)
                record = self.book.record.averages.setdefault(name, AverageRecord(name, now.dtype, retention))
                add_changes([record.change], before, now.reshape(-1), one.shadow[key] - before, [0, len(before)])


def _batches(module: nn.Module) -> int:
    """How many batches a normalization has seen."""
    counted: Any = module.num_batches_tracked
    return int(counted)


def _is_followed(module: nn.Module) -> bool:
    return (
        isinstance(module, _BatchNorm)
        and not isinstance(module, nn.SyncBatchNorm)
        and isinstance(module.running_mean, torch.Tensor)
        and isinstance(module.running_var, torch.Tensor)
        and module.num_batches_tracked is not None
        and not module.running_mean.is_meta
    )
