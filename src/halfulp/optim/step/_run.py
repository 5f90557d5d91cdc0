"""Run the step of all parameters of one specification in one call: pointers, chunks, constants and keys."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from ...kernels import CHUNK, IndexMap, address, check_bits, chosen, chunk_table, chunks, note, plain, run_chunks
from ...rounding._random_bits import mix64_many
from ..parameters._parameter_plan import ParameterPlan
from ._kernel import compiled
from ._reference import reference_amax, reference_step
from ._scales import choose_scales, keep_scales, with_present_scales
from ._spec import StepSpec, draws_of, pointer_count

if TYPE_CHECKING:
    from ._triton_launch import DeviceChunks

METER_COLUMNS, GRADIENT = 4, 4


@dataclass
class Table:
    """Tables that a batch of parameters needs in every step, made anew only if the batch changes.

    Attributes:
        plans: of the batch, in order; kept alive, so that no later plan can have the id of one of them.
        chunks: int64 array of shape (chunks, 4).
        pointers: int64 array of shape (parameters, pointers); the gradients' column is written at each step.
        keyed: uint64 array of shape (2, parameters): seeds and identities.
        held: what an accelerator keeps of it.
    """

    plans: list[ParameterPlan]
    chunks: np.ndarray
    pointers: np.ndarray
    keyed: np.ndarray
    held: DeviceChunks | None = None


class Tables:
    """Cache of the tables of an optimizer's batches; tables that a step does not use are dropped."""

    def __init__(self) -> None:
        self._kept: dict[int, list[Table]] = {}
        self._used: dict[int, list[Table]] = {}

    def of(self, plans: list[ParameterPlan]) -> Table:
        """Return the table of a batch, which its metered steps and its search for amax share."""
        key = id(plans[0].spec)
        used = self._used.setdefault(key, [])
        for table in (*used, *self._kept.get(key, ())):
            if table.plans == plans:
                break
        else:
            table = _new_table(plans)
        if not any(table is other for other in used):
            used.append(table)
        return table

    def end_step(self) -> None:
        """Drop the tables that were not used since the last call."""
        self._kept, self._used = self._used, {}


def _new_table(plans: list[ParameterPlan]) -> Table:
    return Table(
        list(plans),
        chunk_table([plan.index_map for plan in plans]),
        np.array([plan.addresses for plan in plans], np.int64),
        np.array([[plan.seed for plan in plans], [plan.identity for plan in plans]], np.uint64),
    )


def compile_kernels(spec: StepSpec, device: str) -> None:
    """Compile and check a batch's kernel before any batch is stepped, so that a failure leaves all as it was."""
    if chosen(device) == "numba":
        for one in (spec, *([amax_spec(spec)] if spec.scaled else [])):
            checked(one)


def run_step(spec: StepSpec, plans: list[ParameterPlan], tables: Tables) -> None:
    """Step every parameter of a batch, and count lost updates if the specification is metered."""
    if not spec.scaled:
        _write(spec, plans, tables)
        return
    for plan in plans:
        plan.constants = with_present_scales(spec, plan)
    for plan, amax in zip(plans, _find_amax(amax_spec(spec), plans, tables), strict=True):
        choose_scales(spec, plan, amax)
    _write(spec, plans, tables)
    for plan in plans:
        keep_scales(spec, plan)


@functools.cache
def amax_spec(spec: StepSpec) -> StepSpec:
    """Return the specification that finds the largest magnitudes that a step would store."""
    return dataclasses.replace(spec, metered=False, finds_amax=True)


def _find_amax(spec: StepSpec, plans: list[ParameterPlan], tables: Tables) -> list[list[float]]:
    count = 1 + len(spec.scaled_states)
    if chosen(plans[0].gradient.device.type) != "numba":
        return [reference_amax(spec, _parts(s), s.gradient, s.states, s.constants) for s in plans]
    meter, table = _run_compiled(spec, plans, tables)
    found = np.zeros((len(plans), METER_COLUMNS))
    np.maximum.at(found, table.chunks[:, 0], meter)
    return found[:, :count].tolist()


def _parts(plan: ParameterPlan) -> list[torch.Tensor]:
    return plan.parts if plan.copied is None else [*plan.copied, *plan.auxiliary_tensors]


def _write(spec: StepSpec, plans: list[ParameterPlan], tables: Tables) -> None:
    device = plans[0].gradient.device.type
    engine = chosen(device)
    if engine == "numba":
        _run_compiled(spec, plans, tables)
        return
    if engine == "triton" and not spec.scaled and _run_triton(spec, plans, tables):
        return
    if device != "cpu":
        note("engine", f"optimizer step on {device} by plain torch operations: right bits, no fused kernel")
    for plan in plans:
        keyed = np.array([[plan.seed], [plan.identity]], np.uint64)
        lost = reference_step(
            spec,
            _parts(plan),
            plan.gradient,
            plan.states,
            plan.constants,
            [int(key) for key in _keys(spec, [plan], keyed)[0]],
            plan.index_map,
        )
        if lost is not None:
            plan.count(*lost)


def _run_compiled(spec: StepSpec, plans: list[ParameterPlan], tables: Tables) -> tuple[np.ndarray, Table]:
    kernel, table = checked(spec), tables.of(plans)
    _point_at_gradients(table, plans)
    rows = {id(plan.constants): plan.constants for plan in plans}
    numbers = {key: row for row, key in enumerate(rows)}
    meter = np.zeros((len(table.chunks) if spec.metered or spec.finds_amax else 0, METER_COLUMNS))
    run_chunks(
        kernel,
        table.chunks[:, 2],
        table.chunks,
        table.pointers,
        np.array([numbers[id(plan.constants)] for plan in plans], np.int64),
        np.array(list(rows.values()), np.float32).reshape(len(rows), -1),
        _keys(spec, plans, table.keyed).view(np.uint32),
        meter,
    )
    if spec.metered:
        _count(meter, table.chunks, plans)
    return meter, table


def _run_triton(spec: StepSpec, plans: list[ParameterPlan], tables: Tables) -> bool:
    """Run the step on an accelerator; return False if there is no Triton kernel."""
    from ._triton_launch import launch, ready

    device = plans[0].gradient.device
    kernel = ready(spec, device, _trial)
    if kernel is None:
        return False
    table = tables.of(plans)
    _point_at_gradients(table, plans)
    constants = np.array([plan.constants for plan in plans], np.float32).reshape(len(plans), -1)
    keys = _keys(spec, plans, table.keyed)
    table.held, meter = launch(spec, kernel, device, table.chunks, table.pointers, constants, keys, table.held)
    if meter is not None:
        _count(meter, table.held.chunks, plans)
    return True


def _point_at_gradients(table: Table, plans: list[ParameterPlan]) -> None:
    pointers = table.pointers
    pointers[:, GRADIENT] = [plan.gradient.data_ptr() for plan in plans]
    if not pointers[:, GRADIENT].all():  # empty ones, and those that torch has not written out
        for empty in np.flatnonzero(pointers[:, GRADIENT] == 0):
            plans[empty].gradient = plain(plans[empty].gradient, f"the gradient of {plans[empty].name}")
            pointers[empty, GRADIENT] = address(plans[empty].gradient)
    for row, plan in enumerate(plans):
        for column, part in enumerate(plan.copied or ()):
            pointers[row, column] = address(part)


def _count(meter: np.ndarray, chunk_rows: np.ndarray, plans: list[ParameterPlan]) -> None:
    sums = np.zeros((len(plans), METER_COLUMNS))
    np.add.at(sums, chunk_rows[:, 0], meter)
    for plan, row in zip(plans, sums.tolist()):
        plan.count(*row)


def _keys(spec: StepSpec, plans: list[ParameterPlan], keyed: np.ndarray) -> np.ndarray:
    """uint64 array of shape (parameters, words): a key per parameter, step and random word."""
    seeds, identities = keyed[:, :, None]
    steps = np.array([plan.step for plan in plans], np.uint64)[:, None]
    return mix64_many(seeds, steps, identities, np.arange(draws_of(spec)[2], dtype=np.uint64)[None, :])


_checked: set[StepSpec] = set()


def checked(spec: StepSpec):
    """Return a compiled kernel, compared with its reference before its first use in a process."""
    kernel = compiled(spec)
    spec = dataclasses.replace(spec, in_parameter=False) if spec.in_parameter else spec
    if spec not in _checked:
        run = functools.partial(_run_numba, kernel)
        check_bits(spec.name, lambda: _trial(spec, run), lambda: _trial(spec), spec.advice)
        _checked.add(spec)
    return kernel


def _run_numba(kernel, table, pointers, constants, keys) -> np.ndarray:
    meter = np.zeros((len(table), METER_COLUMNS))
    kernel(0, len(table), table, pointers, np.zeros(1, np.int64), constants, keys.view(np.uint32), meter)
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
    gradient[3::16] *= 2.0**-60
    gradient[7], gradient[9] = torch.nan, -0.0
    parts = [torch.zeros(shape, dtype=spec.store.dtype, device="cpu")]
    parts += [torch.zeros(shape, dtype=dtype, device="cpu") for _, dtype in spec.update.auxiliary_tensors(spec.store)]
    spec.update.fill(spec.store, parts, value)
    parts[0][11], parts[0][12:14], parts[0][14] = torch.inf, 0.0, parts[0][30]  # as somebody else may have written them
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
