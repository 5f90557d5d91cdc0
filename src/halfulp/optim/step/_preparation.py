"""What a rule prepares a step with: torch operations on whole float32 tensors of one parameter."""

from __future__ import annotations

import torch

from .._float32_weights import read_weights
from ..parameters._local_tensors import is_dtensor, local, placed_like
from ..parameters._parameter_plan import ParameterPlan
from ._batch import Batch


class WholeTensors:
    """The tensors of one parameter in float32, whole also where the parameter is sharded.

    A DTensor's are gathered when they are asked for: every rank that holds a shard has to ask.

    Attributes:
        shape: of the parameter.
        factors: the rule's float32 tensors, to be read and written.
    """

    def __init__(self, batch: Batch, row: int) -> None:
        self._batch, self._row, self._plan = batch, row, batch.plans[row]
        self.shape = self._plan.index_map.global_shape
        self.factors = {name: local(self._plan.state[name]) for name in batch.spec.factor_names}

    @property
    def weight(self) -> torch.Tensor:
        """The weight, with its auxiliary tensors."""
        found = read_weights([self._plan])[0]
        return self._whole(found * self._plan.scale if self._batch.spec.scaled else found)

    @property
    def gradient(self) -> torch.Tensor:
        """The gradient."""
        batch, row = self._batch, self._row
        found = batch.spec.gradient.decode(batch.gradients[row])
        return self._whole(found * batch.gradient_scales[row] if batch.spec.scaled else found)

    def state(self, name: str) -> torch.Tensor:
        """A state, before the step."""
        spec = self._plan.spec
        k = [slot.name for slot in spec.rule.states].index(name)
        return self._whole(spec.codecs[k].decode(self._plan.states[k]).reshape(self._plan.shape))

    def _whole(self, value: torch.Tensor) -> torch.Tensor:
        parameter = self._plan.parameter
        placed = placed_like(value, parameter)
        return placed.full_tensor() if is_dtensor(placed) else value


def prepare_batch(batch: Batch) -> None:
    """Give a batch what its rule prepares: a tensor for each parameter, and the last of the constants."""
    prepare = batch.spec.rule.prepare
    if prepare is None:
        return
    for row, (group, age) in enumerate(batch.ages):
        made, late = prepare(WholeTensors(batch, row), group, age)
        batch.prepared.append(_own_part(made, batch.plans[row]))
        batch.constants[row] = (*batch.constants[row], *late)


def _own_part(whole: torch.Tensor, plan: ParameterPlan) -> torch.Tensor:
    """Return this rank's elements of a tensor of the whole parameter."""
    own, index = whole, plan.index_map
    for dimension, (count, first, step) in enumerate(zip(index.shape, index.offset, index.step)):
        if count != whole.shape[dimension]:
            places = torch.arange(count, dtype=torch.int64, device=whole.device) * step + first
            own = own.index_select(dimension, places)
    return own.to(torch.float32).contiguous()
