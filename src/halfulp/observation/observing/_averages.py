"""Averages whose changes may be lost as updates are: an EMA's weights, a normalization's statistics."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.swa_utils import AveragedModel

from ..._messages import a_kind
from ...kernels import to_float64
from ...optim import EMA
from ...optim._ema import read_decay
from ...optim._float32 import read_weights
from .._record import AverageRecord
from ..sampling._sampler import read_numbers, take_sample
from ._recorder import Recorder
from ._updates import ChangeComparison, count_changes, has_float32_weight


@dataclass(slots=True)
class _AverageBeforeUpdate:
    """One averaged tensor before its update: samples of it and of its live weight."""

    name: str
    tensor: torch.Tensor
    version: int
    before: torch.Tensor
    live: torch.Tensor


class WeightAverageWatcher:
    """Watches an average of the weights, which is updated between two optimizer steps.

    Args:
        average: `hu.optim.EMA`, torch's AveragedModel, or a module that holds averaged parameters; None for no average.
        model: whose parameters are averaged, of the same names.

    Raises:
        TypeError: something else.
        ValueError: no parameter of the average has the name of one of the model's.
    """

    def __init__(self, recorder: Recorder, average: EMA | nn.Module | None, model: nn.Module) -> None:
        self.recorder, self.average = recorder, average
        self._pairs: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        self._awaited: list[_AverageBeforeUpdate] = []
        self._retention: float | None = None
        if average is None:
            return
        if not isinstance(average, EMA | nn.Module):
            raise TypeError(
                f"average= takes a hu.optim.EMA, a torch.optim.swa_utils.AveragedModel or a module of averaged "
                f"parameters, got {a_kind(average)}"
            )
        live = dict(model.named_parameters())
        for name, tensor in list_averaged_parameters(average).items():
            if name in live and tensor.shape == live[name].shape and tensor.dtype.is_floating_point:
                self._pairs.append((name, tensor, live[name]))
        if not self._pairs:
            raise ValueError("average= holds no parameter named and shaped like one of the model's: give this model's")

    def sample_averages(self) -> None:
        """Sample averages and weights as they are after a step."""
        self._awaited = []
        self._retention = _get_retention(self.average)
        for name, tensor, weight in self._pairs:
            before, live = self._sample_tensor(name, tensor), self._sample_tensor(name, weight)
            if before is not None and live is not None:
                self._awaited.append(_AverageBeforeUpdate(name, tensor, tensor._version, before, live))

    def compare_averages(self) -> None:
        """Compare the averages before the next step with the samples, where they were updated in between."""
        held, self._awaited = self._awaited, []
        for one in held:
            after = self._sample_tensor(one.name, one.tensor)
            if after is None or one.tensor._version == one.version:
                continue
            name = f"average.{one.name}"
            record = self.recorder.record.averages.setdefault(name, AverageRecord(name, one.tensor.dtype, None))
            record.retention = self._retention
            gap = one.live.double() - one.before.double()
            wanted = gap if self._retention is None else gap * (1 - self._retention)
            known = self._retention is not None
            count_changes([ChangeComparison([record.change], one.before, after, wanted, known)])

    def _sample_tensor(self, name: str, tensor: torch.Tensor) -> torch.Tensor | None:
        key = self.recorder.place_key(name)
        if isinstance(self.average, EMA):
            plan = self.average._average_optimizer._plans.get(tensor)
            if plan is not None and has_float32_weight(plan):
                return take_sample(read_weights([plan])[0], key)
        found = read_numbers(tensor)
        return None if found is None else take_sample(found.flat, key).mul_(found.scale)


def list_averaged_parameters(average: EMA | nn.Module) -> dict[str, torch.Tensor]:
    """Return the averaged parameters by name."""
    if isinstance(average, EMA):
        return dict(average._averages)
    return dict((average.module if isinstance(average, AveragedModel) else average).named_parameters())


def _get_retention(average: EMA | nn.Module | None) -> float | None:
    """Return the share of an average that its next update keeps, where it can be told."""
    if isinstance(average, EMA):
        return read_decay(average._average_optimizer.param_groups[0], average.updates + 1)
    if not isinstance(average, AveragedModel):
        return None
    count = int(average.n_averaged)
    if not count:
        return 0.0
    function: Any = average.multi_avg_fn or average.avg_fn
    if function is None:
        return count / (count + 1)
    function = inspect.unwrap(function)
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None)
    # torch's EMA functions hold their decay in a closure.
    held = dict(zip(code.co_freevars, cells)) if code is not None and cells else {}
    decay = held["decay"].cell_contents if "decay" in held else None
    return float(decay) if isinstance(decay, float) else None


@dataclass(slots=True)
class _BatchNormStatistics:
    """Running statistics at the beginning of a step, and float64 shadows that follow the batches."""

    before: dict[str, torch.Tensor]
    shadow: dict[str, torch.Tensor]
    tracked: int
    calls: int = 0


class RunningStatisticsWatcher:
    """Watches the running mean and variance of batch normalizations, by their names."""

    def __init__(self, recorder: Recorder, modules: dict[nn.Module, str]) -> None:
        self.recorder = recorder
        self._modules = modules
        self._shadows: dict[nn.Module, _BatchNormStatistics] = {}

    def copy_statistics(self) -> None:
        """Copy the statistics as they are before the step's batches."""
        self._shadows = {}
        for module in self._modules:
            before = {key: getattr(module, key).detach().cpu().double() for key in ("running_mean", "running_var")}
            shadow = {key: value.clone() for key, value in before.items()}
            self._shadows[module] = _BatchNormStatistics(before, shadow, _count_batches(module))

    def update_shadows(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Update the float64 shadows with a batch."""
        held = self._shadows.get(module)
        if held is None or not module.training or not inputs or not isinstance(inputs[0], torch.Tensor):
            return
        x = to_float64(inputs[0].detach())
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

    def compare_statistics(self) -> None:
        """Compare the statistics with their shadows, where these saw every batch."""
        held, self._shadows = self._shadows, {}
        for module, one in held.items():
            if not one.calls or _count_batches(module) - one.tracked != one.calls:
                continue
            momentum: Any = module.momentum
            for key, before in one.before.items():
                name = ".".join(part for part in (self._modules[module], key) if part)
                now = getattr(module, key).detach()
                retention = None if momentum is None else 1 - float(momentum)
                record = self.recorder.record.averages.setdefault(name, AverageRecord(name, now.dtype, retention))
                count_changes([ChangeComparison([record.change], before, now.reshape(-1), one.shadow[key] - before)])


def _count_batches(module: nn.Module) -> int:
    """Return how many batches a normalization has seen."""
    counted: Any = module.num_batches_tracked
    return int(counted)


def has_running_statistics(module: nn.Module) -> bool:
    """Return whether a module is a normalization of one process that keeps running statistics."""
    return (
        isinstance(module, _BatchNorm)
        and not isinstance(module, nn.SyncBatchNorm)
        and isinstance(module.running_mean, torch.Tensor)
        and isinstance(module.running_var, torch.Tensor)
        and module.num_batches_tracked is not None
        and not module.running_mean.is_meta
    )
