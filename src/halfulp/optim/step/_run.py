"""Run the step of all parameters of one specification in one call: pointers, chunks, constants and keys."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import numpy as np
import torch

from ...kernels import (
    CHUNK,
    IndexMap,
    address,
    check_bits,
    chunks,
    note,
    require_same_bits,
    run_chunks,
    select_engine,
)
from ...kernels.vector._machine_function import address_of
from ...rounding._random_bits import mix64, mix64_many
from ..parameters._local_tensors import scale_of
from ..parameters._parameter_plan import ParameterPlan
from ..parameters._payload_digests import PayloadDigests
from ..parameters._plan_cache import PlanCache
from ._batch import Batch
from ._kernel import compiled
from ._memory import plain_gradient
from ._reference import reference_amax, reference_step
from ._scales import keep_scales, with_new_scales, with_present_scales
from ._spec import StepSpec, draws_of, pointer_count
from ._tables import Table

METER_COLUMNS, GRADIENT = 4, 4
_FEW = 8  # keys that take Python less time than NumPy's arrays


def compile_kernels(batch: Batch) -> None:
    """Compile and check a batch's kernel before any batch is stepped, so that a failure leaves all as it was.

    Raises:
        NotImplementedError: the batch's device does not compute the step as the CPU does.
    """
    if select_engine(batch.device.type) == "llvm":
        for one in (batch.spec, *([amax_spec(batch.spec)] if batch.spec.scaled else [])):
            checked(one)
    if batch.device.type != "cpu":
        require_same_bits(
            batch.device,
            f"optimizer step {batch.spec.name}",
            batch.spec,
            lambda device: _trial(batch.spec, None, device),
            "Keep the parameters on the CPU, or step them by torch.optim",
        )


def run_step(batch: Batch, plans: PlanCache) -> None:
    """Step every parameter of a batch, and count lost updates if its specification is metered."""
    spec = batch.spec
    if not spec.scaled:
        _write(batch, plans)
        return
    if select_engine(batch.device.type) == "triton" and _run_triton_scaled(batch, plans):
        return
    batch.constants = [
        with_present_scales(spec, plan, constants, float(scale))
        for plan, constants, scale in zip(batch.plans, batch.constants, batch.gradient_scales)
    ]
    amax = _find_amax(amax_spec(spec), batch, plans)
    batch.constants = [
        with_new_scales(spec, plan, constants, largest)
        for plan, constants, largest in zip(batch.plans, batch.constants, amax, strict=True)
    ]
    _write(batch, plans)
    for plan, constants in zip(batch.plans, batch.constants):
        keep_scales(spec, plan, constants)


@functools.cache
def amax_spec(spec: StepSpec) -> StepSpec:
    """Return the specification that finds the largest magnitudes that a step would store."""
    return dataclasses.replace(spec, metered=False, finds_amax=True)


def _find_amax(spec: StepSpec, batch: Batch, plans: PlanCache) -> list[list[float]]:
    count = 1 + len(spec.scaled_states)
    if select_engine(batch.device.type) != "llvm":
        return [
            reference_amax(spec, batch.parts(row), batch.gradients[row], plan.states, batch.constants[row])
            for row, plan in enumerate(batch.plans)
        ]
    meter, table = _run_compiled(spec, batch, plans)
    found = np.zeros((len(batch.plans), METER_COLUMNS))
    np.maximum.at(found, table.chunks[:, 0], meter)
    return found[:, :count].tolist()


def _write(batch: Batch, plans: PlanCache) -> None:
    spec, device = batch.spec, batch.device.type
    engine = select_engine(device)
    if engine == "llvm":
        _run_compiled(spec, batch, plans)
        return
    if engine == "triton" and not spec.scaled and _run_triton(batch, plans):  # scaled ones have been tried
        return
    if device != "cpu":
        note("engine", f"optimizer step on {device} by plain torch operations: right bits, no fused kernel")
    for row, plan in enumerate(batch.plans):
        keyed = np.array([[plan.seed], [plan.identity]], np.uint64)
        lost = reference_step(
            spec,
            batch.parts(row),
            batch.gradients[row],
            plan.states,
            batch.constants[row],
            [int(key) for key in _keys(spec, batch.steps[row : row + 1], keyed)[0]],
            plan.index_map,
        )
        if lost is not None:
            plan.record.count(*lost)


def _run_compiled(spec: StepSpec, batch: Batch, plans: PlanCache) -> tuple[np.ndarray, Table]:
    kernel, table = checked(spec), plans.table(batch.plans)
    _point_at_gradients(table, batch)
    rows = {id(constants): constants for constants in batch.constants}
    numbers = {key: row for row, key in enumerate(rows)}
    meter = np.zeros((len(table.chunks) if spec.metered or spec.finds_amax else 0, METER_COLUMNS))
    digests = np.empty(len(table.chunks) if spec.digests else 0, np.uint64)
    given = (
        table.chunks,
        table.pointers,
        np.array([numbers[id(constants)] for constants in batch.constants], np.int64),
        np.array(list(rows.values()), np.float32),
        _keys(spec, batch.steps, table.keyed),
        meter,
        digests,
    )
    run_chunks(kernel, table.chunks[:, 2], *map(address_of, given))
    if spec.digests:
        batch.digests = PayloadDigests(digests, table.ends)
    if spec.metered:
        _count(meter, table.chunks, batch.plans)
    return meter, table


def _run_triton(batch: Batch, plans: PlanCache) -> bool:
    """Run the step on an accelerator; return False if there is no Triton kernel."""
    from ._triton_launch import launch, step_kernel

    spec, device = batch.spec, batch.device
    kernel = step_kernel(spec, device, _trial)
    if kernel is None:
        return False
    table = plans.table(batch.plans)
    held, meter = launch(spec, kernel, device, *_numbers(table, batch), table.device_chunks)
    table.device_chunks = held
    if meter is not None:
        _count(meter, held.chunks, batch.plans)
    return True


def _run_triton_scaled(batch: Batch, plans: PlanCache) -> bool:
    """Run the step of scaled parameters on an accelerator, which chooses the scales; return False if it cannot."""
    from ._triton_launch import launch_scaled, scaled_kernels

    spec, device = batch.spec, batch.device
    kernels = scaled_kernels(spec, amax_spec(spec), device, _trial)
    weights, gradients = [scale_of(plan.parameter) for plan in batch.plans], _scale_tensors(batch)
    if kernels is None or any(scale.device != device for scale in (*weights, *gradients)):
        return False
    addresses = np.array([[address(scale) for scale in pair] for pair in zip(weights, gradients)], np.int64)
    table = plans.table(batch.plans)
    numbers = _numbers(table, batch)
    held, meter, batch.scales = launch_scaled(spec, kernels, device, *numbers, addresses, table.device_chunks)
    table.device_chunks = held
    if meter is not None:
        _count(meter, held.chunks, batch.plans)
    return True


def _scale_tensors(batch: Batch) -> list[torch.Tensor]:
    """Return the scales of the gradients, of those without one as a tensor too."""
    found = [scale for scale in batch.gradient_scales if isinstance(scale, torch.Tensor)]
    if len(found) == len(batch.gradient_scales):
        return found
    one = torch.ones((), dtype=torch.float32, device=batch.device)
    return [scale if isinstance(scale, torch.Tensor) else one for scale in batch.gradient_scales]


def _numbers(table: Table, batch: Batch) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return what a step gives to a device: chunks, pointers, constants and keys."""
    _point_at_gradients(table, batch)
    constants = np.array(batch.constants, np.float32).reshape(len(batch.plans), -1)
    return table.chunks, table.pointers, constants, _keys(batch.spec, batch.steps, table.keyed)


def _point_at_gradients(table: Table, batch: Batch) -> None:
    pointers, gradients = table.pointers, batch.gradients
    pointers[:, GRADIENT] = [gradient.data_ptr() for gradient in gradients]
    if not pointers[:, GRADIENT].all():  # empty ones, and those that torch has not written out
        for row in np.flatnonzero(pointers[:, GRADIENT] == 0).tolist():
            gradients[row] = plain_gradient(gradients[row], batch.plans[row].name)
            pointers[row, GRADIENT] = address(gradients[row])
    for row, copies in batch.copies.items():
        for column, copy in enumerate(copies):
            pointers[row, column] = address(copy)


def _count(meter: np.ndarray, chunk_rows: np.ndarray, plans: list[ParameterPlan]) -> None:
    sums = np.zeros((len(plans), METER_COLUMNS))
    np.add.at(sums, chunk_rows[:, 0], meter)
    for plan, row in zip(plans, sums.tolist()):
        plan.record.count(*row)


def _keys(spec: StepSpec, steps: list[int], keyed: np.ndarray) -> np.ndarray:
    """uint64 array of shape (parameters, words): a key per parameter, step and random word."""
    words = draws_of(spec)[2]
    if len(steps) * words <= _FEW:
        rows = zip(*keyed.tolist(), steps, strict=True)
        mixed = [[mix64(seed, step, identity, word) for word in range(words)] for seed, identity, step in rows]
        return np.array(mixed, np.uint64).reshape(len(steps), words)
    seeds, identities = keyed[:, :, None]
    numbers = np.array(steps, np.uint64)[:, None]
    return mix64_many(seeds, numbers, identities, np.arange(words, dtype=np.uint64)[None, :])


_checked: set[StepSpec] = set()


def checked(spec: StepSpec):
    """Return a compiled kernel, compared with its reference before its first use in a process."""
    kernel = compiled(spec)
    spec = dataclasses.replace(spec, in_parameter=False) if spec.in_parameter else spec
    if spec not in _checked:
        run = functools.partial(_run_llvm, kernel)
        check_bits(spec.name, lambda: _trial(spec, run), lambda: _trial(spec), spec.advice)
        _checked.add(spec)
    return kernel


def _run_llvm(kernel, table, pointers, constants, keys) -> np.ndarray:
    meter = np.zeros((len(table), METER_COLUMNS))
    digests = np.zeros(len(table), np.uint64)
    given = table, pointers, np.zeros(1, np.int64), constants, keys, meter, digests
    kernel(0, len(table), *map(address_of, given))
    return meter


def _trial(spec: StepSpec, run: Callable | None = None, device: torch.device | str = "cpu") -> list[torch.Tensor]:
    """Two steps on fixed elements, tiny, NaN and overwritten ones among them; returns all that was written.

    A scaled parameter takes another scale in the second.

    Args:
        spec: the step specification.
        run: (chunks, pointers, constants, keys) runs a compiled kernel; None for the reference.
        device: where the tensors lie.
    """
    count = 2 * (spec.block or 32)
    shape, index_map = torch.Size([count]), IndexMap((count,), (4 * CHUNK,), (CHUNK,), (1,))
    ramp = torch.linspace(-1, 1, count, dtype=torch.float32, device="cpu")
    value, gradient = ramp * ramp * ramp, ramp * ramp.abs().sqrt() * 3e-2
    value[5::16] *= 2.0**-128
    value[9] = 2.0**-130  # stays a subnormal number, which some devices flush
    gradient[3::16] *= 2.0**-60
    gradient[7], gradient[9] = torch.nan, -0.0
    parts = [torch.zeros(shape, dtype=spec.store.dtype, device="cpu")]
    parts += [torch.zeros(shape, dtype=dtype, device="cpu") for _, dtype in spec.update.auxiliary_tensors(spec.store)]
    spec.update.fill(spec.store, parts, value)
    # As somebody else may have written them; torch 2.6 takes no infinity for eight bits, but casts it.
    parts[0][11] = torch.tensor(torch.inf, dtype=torch.float32, device="cpu").to(spec.store.dtype)
    parts[0][12:14], parts[0][14] = 0.0, parts[0][30]
    parts, gradient = [part.to(device) for part in parts], gradient.to(spec.gradient.dtype).to(device)
    states = [
        [torch.zeros(size, dtype=dtype, device=device) for size, dtype in codec.tensors("state", shape).values()]
        for codec in spec.codecs
    ]
    for k in spec.scaled_states:
        states[k][1].fill_(0.0625)
    constants = tuple(0.3 + 0.05 * position for position in range(len(spec.rule.constants)))
    keys = mix64_many(*(np.full((1, 1), value, np.uint64) for value in (1, 2, 3)), np.arange(draws_of(spec)[2])[None])
    pointers = [*map(address, parts), *[0] * (4 - len(parts)), address(gradient)]
    pointers += [address(tensor) for state in states for tensor in state]
    assert len(pointers) == pointer_count(spec)
    rule_constants = constants
    for new_scale in (0.125, 0.5):
        if spec.scaled:
            scales = (0.125, 1 / new_scale, 4.0, 0.125 / new_scale, new_scale)
            constants = (*rule_constants, *scales, *(0.0625, 16.0) * len(spec.scaled_states))
        if spec.finds_amax:
            row = np.array([constants], np.float32)
            given = (spec, parts, gradient, states, constants)
            found = reference_amax(*given) if run is None else run(
                chunks(index_map, 0), np.array([pointers], np.int64), row, keys
            ).max(0)[: 1 + len(spec.scaled_states)]  # fmt: skip
            return [torch.tensor(found, dtype=torch.float32, device="cpu")]
        if run is None:
            reference_step(spec, parts, gradient, states, constants, [int(k) for k in keys[0]], index_map)
        else:
            row = np.array([constants], np.float32).reshape(1, -1)
            run(chunks(index_map, 0), np.array([pointers], np.int64), row, keys)
    return [tensor.cpu() for tensor in (*parts, *(tensor for state in states for tensor in state))]
