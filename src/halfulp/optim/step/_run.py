"""Run the step of all parameters of one specification in one call, and before it what its rule has to look at."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from array import array
from collections.abc import Callable, Sequence
from operator import is_
from typing import Any

import numpy as np
import torch

from ...kernels import (
    CHUNK_ELEMENTS,
    IndexMap,
    address,
    check_bits,
    cut_into_chunks,
    has_strided_values,
    note_fallback,
    require_same_bits_as_cpu,
    run_chunks,
    select_engine,
    to_plain_memory,
)
from ...kernels.vector._machine_function import get_array_address
from ...rounding._random_bits import mix64, mix64_all
from .._float32 import read_float32_weights
from ..parameters._local_tensors import get_local, get_scaled_parameter_scale, is_dtensor, wrap_like_dtensor
from ..parameters._parameter_plan import ParameterPlan
from ..parameters._step_spec import ComputedReduction, StepSpec, count_pointer_columns
from ._batch import Batch
from ._kernel import GRADIENT_COLUMN, compile_step_kernel, record_step, run_reference_step
from ._scales import append_current_scales, choose_new_scales, write_new_scales

KERNEL_SUM_COLUMN_COUNT = 4
_MOST_KEYS_HASHED_IN_PYTHON = 8  # keys that take Python less time than NumPy's arrays


def compile_kernels(batch: Batch) -> None:
    """Compile and check a batch's kernel before any batch is stepped, so that a failure leaves all as it was."""
    batch.engine = select_engine(batch.device.type)
    if batch.engine == "llvm":
        compile_and_check_kernel(batch.spec)
        reductions: list[ComputedReduction] = ["amax"] if batch.spec.scaled else []
        reductions += ["largest", "sums"] if batch.spec.rule.reductions else []
        for reduction in reductions:
            compile_and_check_kernel(make_reduction_spec(batch.spec, reduction))
    if batch.device.type != "cpu":
        require_same_bits_as_cpu(
            batch.device,
            f"optimizer step {batch.spec.name}",
            batch.spec,
            lambda device: _run_step_on_check_elements(batch.spec, None, device),
            "Keep the parameters on the CPU, or step them by torch.optim",
        )


def run_step(batch: Batch) -> None:
    """Step every parameter of a batch, and count lost updates if its specification is metered."""
    spec = batch.spec
    if not spec.scaled:
        _run_step_on_engine(batch)
        return
    if batch.engine == "triton" and _try_step_on_triton(batch):
        return
    batch.constants = [
        append_current_scales(spec, plan, constants, float(scale))
        for plan, constants, scale in zip(batch.plans, batch.constants, batch.gradient_scales)
    ]
    amax = run_reduction_spec(make_reduction_spec(spec, "amax"), batch, batch.constants)
    batch.constants = choose_new_scales(spec, batch.plans, batch.constants, amax)
    _run_step_on_engine(batch)
    for plan, constants in zip(batch.plans, batch.constants):
        write_new_scales(spec, plan, constants)


@functools.cache
def make_reduction_spec(spec: StepSpec, reduction: ComputedReduction) -> StepSpec:
    """Return the specification that writes nothing and finds what `StepSpec.computed_reduction` names."""
    return dataclasses.replace(spec, counts_lost_updates=False, computed_reduction=reduction)


def run_reduction_spec(spec: StepSpec, batch: Batch, constants: list[tuple[float, ...]]) -> np.ndarray:
    """Run a specification that writes nothing; return a row of what it finds per parameter, on this rank."""
    columns = len(record_step(spec).sums)
    if batch.engine != "llvm":
        found = [run_reference_step(spec, *batch.list_step_tensors(row), own) for row, own in enumerate(constants)]
        return np.array(found).reshape(-1, columns)
    meter = _run_llvm_kernel(spec, batch, constants)
    totals = np.zeros((len(batch.plans), KERNEL_SUM_COLUMN_COUNT))
    (np.add if spec.computed_reduction == "sums" else np.maximum).at(totals, batch.table.chunks[:, 0], meter)
    return totals[:, :columns]


def _run_step_on_engine(batch: Batch) -> None:
    spec, device = batch.spec, batch.device.type
    if batch.engine == "llvm":
        _run_llvm_kernel(spec, batch, batch.constants)
        return
    if batch.engine == "triton" and not spec.scaled and _try_step_on_triton(batch):  # scaled ones have been tried
        return
    if device != "cpu":
        note_fallback("engine", f"optimizer step on {device} by plain torch operations: right bits, no fused kernel")
    keys = _make_random_keys(batch).tolist()
    for row, plan in enumerate(batch.plans):
        if not has_strided_values(batch.gradients[row]):  # freed, or not written out
            batch.gradients[row] = to_plain_memory(batch.gradients[row], f"the gradient of {plan.name}")
        key, tensors = (keys[row] or [None])[0], batch.list_step_tensors(row)
        lost = run_reference_step(spec, *tensors, batch.constants[row], key, plan.index_map)
        if lost:
            plan.record.add_counted_step(*lost)


def _run_llvm_kernel(spec: StepSpec, batch: Batch, constants: list[tuple[float, ...]]) -> np.ndarray:
    kernel, table = compile_and_check_kernel(spec), batch.table
    _write_step_pointers(batch)
    table.random_keys[...] = _make_random_keys(batch)
    chunks, pointers, rows, keys = table.table_addresses
    distinct, row_of_each = _find_distinct_constants(constants)
    numbers, chosen = array("f", itertools.chain.from_iterable(distinct)), array("q", row_of_each)
    rows = chosen.buffer_info()[0] if row_of_each else rows
    counts = spec.counts_lost_updates or spec.computed_reduction
    meter = np.zeros((len(table.chunks) if counts else 0, KERNEL_SUM_COLUMN_COUNT))
    meter_address = get_array_address(meter) if counts else 0
    run_chunks(kernel, table.chunks[:, 2], chunks, pointers, rows, numbers.buffer_info()[0], keys, meter_address)
    if spec.counts_lost_updates:
        _record_lost_updates(meter, table.chunks, batch.plans)
    return meter


def _try_step_on_triton(batch: Batch) -> bool:
    """Run the step on an accelerator, which chooses the scales if there are some; return False if it cannot."""
    from ...kernels.triton._launch import copy_chunks_to_device
    from . import _triton_kernel as triton

    spec, device, table = batch.spec, batch.device, batch.table
    specs = (make_reduction_spec(spec, "amax"), spec) if spec.scaled else (spec,)
    found = (triton.get_checked_step_kernel(one, device, _run_step_on_check_elements) for one in specs)
    kernels = [kernel for kernel in found if kernel is not None]
    present: list[list[torch.Tensor]] = []
    if spec.scaled:
        # The scales of weights, of gradients, of those without one as a tensor too, and of each scaled state.
        one = torch.ones((), dtype=torch.float32, device=device)
        present.append([get_scaled_parameter_scale(plan.parameter) for plan in batch.plans])
        present.append([scale if isinstance(scale, torch.Tensor) else one for scale in batch.gradient_scales])
        present += [[plan.states[k][1] for plan in batch.plans] for k in spec.scaled_codec_by_state]
    if len(kernels) < len(specs) or any(scale.device != device for scales in present for scale in scales):
        return False
    _write_step_pointers(batch)
    distinct, row_of_each = _find_distinct_constants(batch.constants)
    constants = np.array(distinct, np.float32).reshape(len(distinct), -1)
    constants = constants[row_of_each or [0] * len(batch.constants)]
    constants = np.pad(constants, ((0, 0), (0, len(spec.constant_names) - constants.shape[1])))  # room for the scales
    placed = table.chunks_on_device = copy_chunks_to_device(
        table.chunks, table.pointers, device, table.chunks_on_device
    )
    rows = triton.make_device_table_rows(device, table.pointers, constants, _make_random_keys(batch))
    if spec.scaled:
        totals, _ = triton.launch_scaled_step(spec, kernels, placed, rows, present)
    else:
        totals = kernels[0].launch(placed, rows)
    if spec.counts_lost_updates:
        _record_lost_updates(totals.sum(1).cpu().numpy(), placed.chunks, batch.plans)
    return True


def _find_distinct_constants(constants: list[tuple[float, ...]]) -> tuple[list[tuple[float, ...]], list[int]]:
    """Return the constants that differ, and which of them each parameter has; nothing where all have the same."""
    if all(map(is_, constants, itertools.repeat(constants[0]))):
        return constants[:1], []
    distinct = {id(one): one for one in constants}
    row_of = {key: row for row, key in enumerate(distinct)}
    return [*distinct.values()], [row_of[id(one)] for one in constants]


def _write_step_pointers(batch: Batch) -> None:
    pointers, gradients = batch.table.pointers, batch.gradients
    found = [*map(torch.Tensor.data_ptr, gradients)]
    pointers[:, GRADIENT_COLUMN] = found
    if not all(found):  # empty ones, and those that torch has not written out
        for row in np.flatnonzero(pointers[:, GRADIENT_COLUMN] == 0).tolist():
            gradients[row] = to_plain_memory(gradients[row], f"the gradient of {batch.plans[row].name}")
            pointers[row, GRADIENT_COLUMN] = address(gradients[row])
    for row, one in enumerate(batch.prepared_tensors):
        pointers[row, -1] = address(one)
    for row, copies in batch.contiguous_copies.items():
        for column, copy in enumerate(copies):
            pointers[row, column] = address(copy)


def _record_lost_updates(meter: np.ndarray, chunk_rows: np.ndarray, plans: list[ParameterPlan]) -> None:
    sums = np.zeros((len(plans), KERNEL_SUM_COLUMN_COUNT))
    np.add.at(sums, chunk_rows[:, 0], meter)
    for plan, row in zip(plans, sums.tolist()):
        plan.record.add_counted_step(*row)


def _make_random_keys(batch: Batch) -> np.ndarray:
    """uint64 array of shape (parameters, 1): a key per parameter and step; (parameters, 0) without draws."""
    table, steps = batch.table, batch.step_numbers
    seeds, step = table.seeds, steps[0]
    if not batch.spec.draws_random_bits:
        return table.random_keys
    if isinstance(seeds, int) and len({*steps}) == 1:
        if len(steps) <= _MOST_KEYS_HASHED_IN_PYTHON:
            return np.array([[mix64(seeds, step, plan.stream_id)] for plan in table.plans], np.uint64)
        return mix64_all(seeds, step, table.stream_ids)
    every = np.array(steps, np.uint64)[:, None]
    return mix64_all(np.full(every.shape, seeds, np.uint64), every, table.stream_ids)


def compile_and_check_kernel(spec: StepSpec) -> Callable[..., Any]:
    """Return a compiled kernel, compared with its reference before its first use in a process."""
    held = vars(spec)  # as a cached property would keep it, but for the layers: copies and pickles leave it out
    if "checked_kernel" in held:
        return held["checked_kernel"]
    spec = dataclasses.replace(spec, has_components_in_parameter=False) if spec.has_components_in_parameter else spec
    kernel = compile_step_kernel(spec)

    def run(chunks, pointers, constants, keys) -> np.ndarray:
        meter = np.zeros((len(chunks), KERNEL_SUM_COLUMN_COUNT))
        given = chunks, pointers, np.zeros(1, np.int64), constants, keys, meter
        kernel(0, len(chunks), *map(get_array_address, given))
        return meter

    check_bits(
        spec.name, lambda: _run_step_on_check_elements(spec, run), lambda: _run_step_on_check_elements(spec), spec
    )
    held["checked_kernel"] = kernel
    return kernel


def _run_step_on_check_elements(
    spec: StepSpec, run: Callable | None = None, device: torch.device | str = "cpu"
) -> list[torch.Tensor]:
    """Make two steps on fixed elements, tiny, NaN and overwritten ones among them; return all that was written.

    A scaled parameter takes another scale in the second. `run(chunks, pointers, constants, keys)` runs a compiled
    kernel; without it the reference runs.
    """
    count = 2 * (spec.block_length or 32)
    shape, index_map = torch.Size([count]), IndexMap((count,), (4 * CHUNK_ELEMENTS,), (CHUNK_ELEMENTS,), (1,))
    ramp = torch.linspace(-1, 1, count, dtype=torch.float32, device="cpu")
    value, gradient = ramp * ramp * ramp, ramp * ramp.abs().sqrt() * 3e-2
    value[5::16] *= 2.0**-128
    value[9] = 2.0**-130  # stays a subnormal number, which some devices flush
    gradient[3::16] *= 2.0**-60
    gradient[7], gradient[9] = 1.0 if spec.computes_rule_reductions else torch.nan, -0.0  # a NaN would be the sum
    parts = [torch.zeros(shape, dtype=spec.store.dtype, device="cpu")]
    parts += [
        torch.zeros(shape, dtype=dtype, device="cpu") for _, dtype in spec.update.describe_auxiliary_tensors(spec.store)
    ]
    spec.update.fill(spec.store, parts, value)
    # As somebody else may have written them; torch 2.6 takes no infinity for eight bits, but casts it.
    parts[0][11] = torch.tensor(torch.inf, dtype=torch.float32, device="cpu").to(spec.store.dtype)
    parts[0][12:14], parts[0][14] = 0.0, parts[0][30]
    parts, gradient = [part.to(device) for part in parts], gradient.to(spec.gradient.dtype).to(device)
    states = [
        [
            torch.zeros(size, dtype=dtype, device=device)
            for size, dtype in codec.describe_tensors("state", shape).values()
        ]
        for codec in spec.codecs
    ]
    for k in spec.scaled_codec_by_state:
        states[k][1].fill_(0.0625)
    if spec.rule.prepare is not None:
        states.append([(ramp * ramp).to(device)])
    keys = np.full((1, int(spec.draws_random_bits)), mix64(1, 2, 3), np.uint64)
    pointers = [*map(address, parts), *[0] * (4 - len(parts)), address(gradient)]
    pointers += [address(tensor) for state in states for tensor in state]
    assert len(pointers) == count_pointer_columns(spec)
    chunks, table, key = cut_into_chunks(index_map, 0), np.array([pointers], np.int64), keys[0].tolist() or [None]
    of_rule = tuple(0.3 + 0.05 * position for position in range(len(spec.rule.constants)))
    of_sums = (0.25, 1.5 * 2.0**16, 1.5 * 2.0**-30) * len(spec.rule.reductions if spec.computes_rule_reductions else ())
    for new_scale in (0.125, 0.5):
        of_scales = (
            0.125,
            1 / new_scale,
            4.0,
            0.125 / new_scale,
            new_scale,
            *(0.0625, 16.0) * len(spec.scaled_codec_by_state),
        )
        constants = (*of_rule, *(of_scales if spec.scaled else ()), *of_sums)
        if run is not None:
            found = run(chunks, table, np.array([constants], np.float32).reshape(1, -1), keys)
        elif spec.computed_reduction:
            found = np.array([run_reference_step(spec, parts, gradient, states, constants)])
        else:
            run_reference_step(spec, parts, gradient, states, constants, key[0], index_map)
        if spec.computed_reduction:
            return [torch.tensor(found.max(0)[: len(record_step(spec).sums)], dtype=torch.float32, device="cpu")]
    return [tensor.cpu() for tensor in (*parts, *(tensor for state in states for tensor in state))]


class GatheredTensors:
    """The tensors of one parameter in float32, whole also where the parameter is sharded.

    A DTensor's are gathered when they are asked for: every rank that holds a shard has to ask.
    """

    def __init__(self, batch: Batch, row: int) -> None:
        self._batch, self._row, self._plan = batch, row, batch.plans[row]
        self.shape = self._plan.index_map.global_shape
        # The rule's float32 tensors, to be read and written.
        self.factors = {name: get_local(self._plan.state[name]) for name in batch.spec.factor_names}

    @property
    def weight(self) -> torch.Tensor:
        """The weight, with its auxiliary tensors."""
        found = read_float32_weights([self._plan])[0]
        return self._gather_shards(found * self._plan.scale if self._batch.spec.scaled else found)

    @property
    def gradient(self) -> torch.Tensor:
        """The gradient."""
        batch, row = self._batch, self._row
        found = batch.spec.gradient.decode(batch.gradients[row])
        return self._gather_shards(found * batch.gradient_scales[row] if batch.spec.scaled else found)

    def state(self, name: str) -> torch.Tensor:
        """Return a state, before the step."""
        spec = self._plan.spec
        k = [slot.name for slot in spec.rule.states].index(name)
        return self._gather_shards(spec.codecs[k].decode(self._plan.states[k]).reshape(self._plan.shape))

    def _gather_shards(self, value: torch.Tensor) -> torch.Tensor:
        placed = wrap_like_dtensor(value, self._plan.parameter)
        return placed.full_tensor() if is_dtensor(placed) else value


def add_prepared_tensors(batch: Batch) -> None:
    """Give a batch what its rule prepares: a tensor for each parameter, and the last of the constants."""
    prepare = batch.spec.rule.prepare
    if prepare is None:
        return
    for row, (group, age) in enumerate(batch.groups_and_steps):
        with torch.autocast(batch.device.type, enabled=False):  # the caller's would multiply in 16 bits
            made, late = prepare(GatheredTensors(batch, row), group, age)
        shard = batch.plans[row].index_map
        if made.shape != shard.global_shape:
            raise ValueError(
                f"rule {batch.spec.rule.name!r} prepares a tensor of shape {tuple(made.shape)} for a parameter of "
                f"shape {shard.global_shape}: give one of its shape"
            )
        places = zip(shard.shape, shard.offset, shard.step)
        own = made[tuple(slice(first, first + count * step, step) for count, first, step in places)]
        # A copy of a shard, so that nothing keeps the whole.
        batch.prepared_tensors.append(own.to(torch.float32, copy=own.numel() < made.numel()).contiguous())
        batch.constants[row] = (*batch.constants[row], *late)
        if batch.spec.rule.late_values is None and len(batch.constants[row]) != len(batch.spec.rule.constants):
            batch.spec.rule.refuse_constant_count(batch.constants[row])


# Room of a value under its power of two, |v| < 4, or its square, before anything is added.
_SUM_HEADROOM_BITS = 4


def compute_rule_sums(batches: Sequence[Batch]) -> list[list[tuple[float, ...]]]:
    """Return the sums of each parameter of each batch, nothing where the rule has none; all ranks have to call this."""
    summed = [batch for batch in batches if batch.spec.rule.reductions]
    if not summed:
        return [[] for _ in batches]
    largest = [
        _reduce_over_ranks(batch, _run_reducing_kernel(batch, "largest"), torch.distributed.ReduceOp.MAX)
        for batch in summed
    ]
    counts = []
    for batch in summed:
        elements = np.array([[math.prod(plan.index_map.global_shape)] for plan in batch.plans], np.float64)
        counts.append(elements.repeat(len(batch.spec.rule.reductions), 1))
    _reduce_over_parameters(summed, largest, np.max)
    _reduce_over_parameters(summed, counts, np.sum)
    totals = []
    for batch, top, count in zip(summed, largest, counts):
        # The constants RULE_SUM_SCALE_CONSTANT_NAMES, (parameters, sums, 3): powers of two, and anchors of 1.5 of one.
        power, length = np.clip(2 - np.frexp(top)[1], -126, 126), np.ceil(np.log2(np.maximum(count, 1.0)))
        anchor = length + _SUM_HEADROOM_BITS
        columns = [np.exp2(power), 1.5 * np.exp2(anchor), 1.5 * np.exp2(anchor + length - 53)]
        scales = np.stack(columns, -1).astype(np.float32)
        parts = _reduce_over_ranks(batch, _run_reducing_kernel(batch, "sums", scales), torch.distributed.ReduceOp.SUM)
        totals.append((parts[:, ::2], parts[:, 1::2], scales[:, :, 0].astype(np.float64)))
    for k in (0, 1):
        _reduce_over_parameters(summed, [parts[k] for parts in totals], np.sum)
    sums: dict[int, list[tuple[float, ...]]] = {}
    for batch, (high, low, inverse) in zip(summed, totals):
        squares = np.array([reduction.squares for reduction in batch.spec.rule.reductions])
        found = (high + low) / np.where(squares, inverse**2, inverse)
        sums[id(batch)] = [*map(tuple, found.tolist())]
    return [sums.get(id(batch), []) for batch in batches]


def add_constants_from_sums(batches: Sequence[Batch], sums: Sequence[list[tuple[float, ...]]]) -> None:
    """Give the batches the constants that follow from their sums."""
    for batch, found in zip(batches, sums):
        late = batch.spec.rule.late_values
        if late is None:
            continue
        made: dict[tuple[int, int, tuple[float, ...]], tuple[float, ...]] = {}
        for row, ((group, age), total) in enumerate(zip(batch.groups_and_steps, found, strict=True)):
            key = id(group), age, total
            if key not in made:
                made[key] = (*batch.constants[row], *late(group, age, total))
                if len(made[key]) != len(batch.spec.rule.constants):
                    batch.spec.rule.refuse_constant_count(made[key])
            batch.constants[row] = made[key]


def _run_reducing_kernel(batch: Batch, reduction: ComputedReduction, scales: np.ndarray | None = None) -> np.ndarray:
    """Run a reducing kernel of a batch, and return a row per parameter: its "sums" or "largest" magnitudes."""
    spec = make_reduction_spec(batch.spec, reduction)
    late = len(spec.rule.constants) - len(batch.constants[0])
    given = []
    for row, (plan, constants) in enumerate(zip(batch.plans, batch.constants)):
        whole = (*constants, *(0.0,) * late)
        if spec.scaled:
            whole = append_current_scales(batch.spec, plan, whole, float(batch.gradient_scales[row]))
        own = (0.0,) * (3 * len(spec.rule.reductions)) if scales is None else scales[row].ravel().tolist()
        given.append((*whole, *own))
    return run_reduction_spec(spec, batch, given)


def _reduce_over_parameters(batches: Sequence[Batch], values: Sequence[np.ndarray], how: Callable[..., Any]) -> None:
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


def _reduce_over_ranks(batch: Batch, found: np.ndarray, how: torch.distributed.ReduceOp.RedOpType) -> np.ndarray:
    """Reduce what was found over the ranks that share each parameter."""
    rows_by_mesh: dict[tuple, list[int]] = {}
    for row, plan in enumerate(() if batch.table.has_only_plain_tensors else batch.plans):
        if is_dtensor(plan.parameter):
            replicated = tuple(placement.is_replicate() for placement in plan.parameter.placements)
            rows_by_mesh.setdefault((id(plan.parameter.device_mesh), replicated), []).append(row)
    for (_, replicated), rows in rows_by_mesh.items():
        first: Any = batch.plans[rows[0]].parameter
        numbers = torch.from_numpy(found[rows]).to(first._local_tensor.device)
        for dimension, is_replicated in enumerate(replicated):
            if not is_replicated:
                torch.distributed.all_reduce(numbers, how, group=first.device_mesh.get_group(dimension))
        found[rows] = numbers.cpu().numpy()
    return found
