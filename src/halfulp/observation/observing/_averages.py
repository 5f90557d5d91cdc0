"""Averages of the weights, whose changes may be lost as updates are."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from ..._messages import name_type
from ...optim import EMA
from ...optim._ema import compute_ema_decay
from ...optim._float32 import read_float32_weights
from .._record import AverageRecord
from ._recorder import Recorder
from ._sampler import read_numbers, take_sample
from ._updates import has_float32_weight, record_realised_changes


class _AverageBeforeUpdate(NamedTuple):
    """One averaged tensor before its update: a sample of it, and the change that the update wants, if it is known."""

    name: str
    tensor: torch.Tensor
    version: int
    before: torch.Tensor
    # The weights less the averages.
    gap: torch.Tensor
    wanted: torch.Tensor | None


class WeightAverageWatcher:
    """Watches an average of a model's weights, which is updated between two optimizer steps."""

    def __init__(self, recorder: Recorder, average: EMA | nn.Module, model: nn.Module) -> None:
        self.recorder, self.average = recorder, average
        self._pairs: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        self._awaited: list[_AverageBeforeUpdate] = []
        if not isinstance(average, EMA | nn.Module):
            raise TypeError(
                f"average= takes a hu.optim.EMA, a torch.optim.swa_utils.AveragedModel or a module of averaged "
                f"parameters, got {name_type(average)}"
            )
        live = dict(model.named_parameters())
        if isinstance(average, EMA):
            averaged = average._averages
        else:
            averaged = dict((average.module if isinstance(average, AveragedModel) else average).named_parameters())
        for name, tensor in averaged.items():
            if name in live and tensor.shape == live[name].shape and tensor.dtype.is_floating_point:
                self._pairs.append((name, tensor, live[name]))
        if not self._pairs:
            raise ValueError("average= holds no parameter named and shaped like one of the model's: give this model's")

    def sample_averages(self) -> None:
        """Sample averages and weights as they are after a step."""
        self._awaited = []
        for name, tensor, weight in self._pairs:
            before, live = self._sample_tensor(name, tensor), self._sample_tensor(name, weight)
            if before is not None and live is not None:
                wanted = _compute_wanted_change(self.average, before, live)
                self._awaited.append(_AverageBeforeUpdate(name, tensor, tensor._version, before, live - before, wanted))

    def compare_averages(self) -> None:
        """Compare the averages before the next step with the samples, where they were updated in between."""
        awaited, self._awaited = self._awaited, []
        for name, tensor, version, before, gap, wanted in awaited:
            after = self._sample_tensor(name, tensor)
            if after is None or tensor._version == version:
                continue
            key, known = f"average.{name}", wanted is not None
            record = self.recorder.record.averages.setdefault(key, AverageRecord(key, tensor.dtype))
            record_realised_changes(
                record.change, before, after, gap if wanted is None else wanted, is_wanted_known=known
            )

    def _sample_tensor(self, name: str, tensor: torch.Tensor) -> torch.Tensor | None:
        key = self.recorder.get_sampling_key(name)
        if isinstance(self.average, EMA):
            plan = self.average._average_optimizer._plans.get(tensor)
            if plan is not None and has_float32_weight(plan):
                return take_sample(read_float32_weights([plan])[0], key)
        found = read_numbers(tensor)
        return None if found is None else take_sample(found.flat, key).mul_(found.scale)


def _compute_wanted_change(average: EMA | nn.Module, before: torch.Tensor, live: torch.Tensor) -> torch.Tensor | None:
    """Return the change of averaged elements that the next update wants, where it can be computed."""
    if isinstance(average, EMA):
        return (live - before) * (
            1 - compute_ema_decay(average._average_optimizer.param_groups[0], average.updates + 1)
        )
    if not isinstance(average, AveragedModel):
        return None
    count: Any = average.n_averaged.cpu()
    if not count or (average.multi_avg_fn is None and average.avg_fn is None):
        return (live - before) / (int(count) + 1)
    after = before.clone()
    with torch.random.fork_rng([]):  # the user's own function may round stochastically
        if average.multi_avg_fn is not None:
            average.multi_avg_fn([after], [live], count)
        elif average.avg_fn is not None:
            after = average.avg_fn(after, live, count)
    return after - before
