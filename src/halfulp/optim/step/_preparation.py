"""What a rule needs before its update: prepared tensors of one parameter, and sums over tensors, ranks and all."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from .._float32_weights import read_weights
from ..parameters._local_tensors import is_dtensor, local, placed_like
from ..parameters._parameter_plan import ParameterPlan
from ._batch import Batch
from ._run import reduce, reducing_specs
from ._scales import with_present_scales

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


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


# Room of a value under its power of two, |v| < 4, or its square, before anything is added.
_ROOM = 4


def reduce_batches(batches: Sequence[Batch]) -> list[list[tuple[float, ...]]]:
    """Return the sums of each parameter of each batch, nothing where the rule has none.

    Every rank that holds a shard of a parameter has to take part, as in a step by torch.optim with clipping.
    """
    summed = [batch for batch in batches if batch.spec.rule.reductions]
    if not summed:
        return [[] for _ in batches]
    largest = [_over_ranks(batch, _run(batch, "largest"), torch.distributed.ReduceOp.MAX) for batch in summed]
    counts = [_counts(batch) for batch in summed]
    _spread(summed, largest, np.max)
    _spread(summed, counts, np.sum)
    totals = []
    for batch, top, count in zip(summed, largest, counts):
        scales = _sum_scales(top, count)
        parts = _over_ranks(batch, _run(batch, "sums", scales), torch.distributed.ReduceOp.SUM)
        totals.append((parts[:, ::2], parts[:, 1::2], scales[:, :, 0].astype(np.float64)))
    for k in (0, 1):
        _spread(summed, [parts[k] for parts in totals], np.sum)
    sums = {id(batch): _unscaled(batch, *parts) for batch, parts in zip(summed, totals)}
    return [sums.get(id(batch), []) for batch in batches]


def finish_constants(batches: Sequence[Batch], sums: Sequence[list[tuple[float, ...]]]) -> None:
    """Give the batches the constants that follow from their sums."""
    for batch, found in zip(batches, sums):
        late = batch.spec.rule.late_values
        if late is None:
            continue
        made: dict[tuple[int, int, tuple[float, ...]], tuple[float, ...]] = {}
        for row, ((group, age), total) in enumerate(zip(batch.ages, found, strict=True)):
            key = id(group), age, total
            if key not in made:
                made[key] = (*batch.constants[row], *late(group, age, total))
            batch.constants[row] = made[key]


def _run(batch: Batch, what: str, scales: np.ndarray | None = None) -> np.ndarray:
    """Return what one pass finds: a row per parameter."""
    spec = reducing_specs(batch.spec)[what == "sums"]
    late = len(spec.rule.constants) - len(batch.constants[0])
    given = []
    for row, (plan, constants) in enumerate(zip(batch.plans, batch.constants)):
        whole = (*constants, *(0.0,) * late)
        if spec.scaled:
            whole = with_present_scales(batch.spec, plan, whole, float(batch.gradient_scales[row]))
        own = (0.0,) * (3 * len(spec.rule.reductions)) if scales is None else scales[row].ravel().tolist()
        given.append((*whole, *own))
    return reduce(spec, batch, given)


def _counts(batch: Batch) -> np.ndarray:
    numbers = [math.prod(plan.index_map.global_shape) for plan in batch.plans]
    return np.array([numbers] * len(batch.spec.rule.reductions), np.float64).T.copy()


def _sum_scales(largest: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return the constants SUM_SCALES, (parameters, sums, 3): powers of two, and anchors of 1.5 of one."""
    power = np.clip(2 - np.frexp(largest)[1], -126, 126)
    length = np.ceil(np.log2(np.maximum(counts, 1.0)))
    anchor = length + _ROOM
    scales = [np.exp2(power), 1.5 * np.exp2(anchor), 1.5 * np.exp2(anchor + length - 53)]
    return np.stack(scales, -1).astype(np.float32)


def _unscaled(batch: Batch, high: np.ndarray, low: np.ndarray, inverse: np.ndarray) -> list[tuple[float, ...]]:
    squares = np.array([reduction.squares for reduction in batch.spec.rule.reductions])
    found: list[tuple[float, ...]] = [*map(tuple, ((high + low) / np.where(squares, inverse**2, inverse)).tolist())]
    return found


def _spread(batches: Sequence[Batch], values: Sequence[np.ndarray], how) -> None:
    """Put the largest or the sum over all parameters where a sum is over all, in place."""
    most = max(len(batch.spec.rule.reductions) for batch in batches)
    for k in range(most):
        members = [
            value[:, k]
            for batch, value in zip(batches, values)
            if k < len(batch.spec.rule.reductions) and batch.spec.rule.reductions[k].over_all
        ]
        if members:
            whole = how(np.concatenate(members))
            for member in members:
                member[:] = whole


def _over_ranks(batch: Batch, found: np.ndarray, how: torch.distributed.ReduceOp.RedOpType) -> np.ndarray:
    """Return what is found over the ranks that share each parameter."""
    for first, rows in _runs_of_meshes(batch):
        numbers = torch.from_numpy(found[rows]).to(first._local_tensor.device)
        for dimension, placement in enumerate(first.placements):
            if not placement.is_replicate():
                torch.distributed.all_reduce(numbers, how, group=first.device_mesh.get_group(dimension))
        found[rows] = numbers.cpu().numpy()
    return found


def _runs_of_meshes(batch: Batch) -> Iterator[tuple[DTensor, list[int]]]:
    """Yield the first DTensor and the rows of those that follow each other on one mesh, replicated along the same."""
    parameters = [] if batch.table.is_plain else [plan.parameter for plan in batch.plans]
    sharded = [(row, held) for row, held in enumerate(parameters) if is_dtensor(held)]
    for _, run in itertools.groupby(sharded, lambda one: _place(one[1])):
        members = [*run]
        yield members[0][1], [row for row, _ in members]


def _place(parameter: DTensor) -> tuple[int, tuple[bool, ...]]:
    return id(parameter.device_mesh), tuple(placement.is_replicate() for placement in parameter.placements)
