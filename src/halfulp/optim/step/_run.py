"""All parameters of one kind in one call: tables of pointers, chunks, constants and keys."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from ...kernels import CHUNK, IndexMap, address, check_bits, chosen, chunk_table, chunks, note, plain, run_chunks
from ...rounding._random_bits import mix64_many
from .._parameter_plan import Slot
from ._kernel import Kind, compiled, draws_of, pointer_count
from ._reference import reference_peaks, reference_step
from ._scales import choose_scales, keep_scales, with_present_scales

METER_COLUMNS, GRADIENT = 4, 4


@dataclass
class Table:
    """What the parameters of a batch need in every step, made again only when the batch changes.

    Attributes:
        slots: of the batch, in order; held, so that none can be mistaken for a later one.
        chunks: int64 array of shape (chunks, 4).
        pointers: int64 array of shape (parameters, pointers); the gradients' column is written at each step.
        keyed: uint64 array of shape (2, parameters): seeds and identities.
        held: what an accelerator keeps of it.
    """

    slots: list[Slot]
    chunks: np.ndarray
    pointers: np.ndarray
    keyed: np.ndarray
    held: object = None


class Tables:
    """The tables of an optimizer's batches, from one step to the next; those that a step does not need go with it."""

    def __init__(self) -> None:
        self._kept: dict[int, list[Table]] = {}
        self._used: dict[int, list[Table]] = {}

    def of(self, slots: list[Slot]) -> Table:
        """The table of a batch, which serves its metered steps and its search for peaks as well."""
        key = id(slots[0].kind)
        used = self._used.setdefault(key, [])
        for table in (*used, *self._kept.get(key, ())):
            if table.slots == slots:
                break
        else:
            table = _new_table(slots)
        if not any(table is other for other in used):
            used.append(table)
        return table

    def end_step(self) -> None:
        """Let the tables go that were not asked for since the last call."""
        self._kept, self._used = self._used, {}


def _new_table(slots: list[Slot]) -> Table:
    return Table(
        list(slots),
        chunk_table([slot.index_map for slot in slots]),
        np.array([slot.addresses for slot in slots], np.int64),
        np.array([[slot.seed for slot in slots], [slot.identity for slot in slots]], np.uint64),
    )


def make_ready(kind: Kind, device: str) -> None:
    """Compile and check a batch's kernel before any batch is stepped, so that a failure leaves all as it was."""
    if chosen(device) == "numba":
        for one in (kind, *([peaks_of(kind)] if kind.scaled else [])):
            checked(one)


def run_step(kind: Kind, slots: list[Slot], tables: Tables) -> None:
    """Step every parameter of a batch, and count what was lost where the kind is metered."""
    if not kind.scaled:
        _write(kind, slots, tables)
        return
    for slot in slots:
        slot.constants = with_present_scales(kind, slot)
    for slot, peaks in zip(slots, _find_peaks(peaks_of(kind), slots, tables), strict=True):
        choose_scales(kind, slot, peaks)
    _write(kind, slots, tables)
    for slot in slots:
        keep_scales(kind, slot)


@functools.cache
def peaks_of(kind: Kind) -> Kind:
    """The kind that finds the largest magnitudes that a kind would store."""
    return dataclasses.replace(kind, metered=False, peaks=True)


def _find_peaks(kind: Kind, slots: list[Slot], tables: Tables) -> list[list[float]]:
    count = 1 + len(kind.scaled_states)
    if chosen(slots[0].gradient.device.type) != "numba":
        return [reference_peaks(kind, _parts(s), s.gradient, s.states, s.constants) for s in slots]
    meter, table = _run_compiled(kind, slots, tables)
    found = np.zeros((len(slots), METER_COLUMNS))
    np.maximum.at(found, table.chunks[:, 0], meter)
    return found[:, :count].tolist()


def _parts(slot: Slot) -> list[torch.Tensor]:
    return slot.parts if slot.copied is None else [*slot.copied, *slot.companions]


def _write(kind: Kind, slots: list[Slot], tables: Tables) -> None:
    device = slots[0].gradient.device.type
    engine = chosen(device)
    if engine == "numba":
        _run_compiled(kind, slots, tables)
        return
    if engine == "triton" and not kind.scaled and _run_triton(kind, slots, tables):
        return
    if device != "cpu":
        note("engine", f"optimizer step on {device} by plain torch operations: right bits, no fused kernel")
    for slot in slots:
        keyed = np.array([[slot.seed], [slot.identity]], np.uint64)
        lost = reference_step(
            kind,
            _parts(slot),
            slot.gradient,
            slot.states,
            slot.constants,
            [int(key) for key in _keys(kind, [slot], keyed)[0]],
            slot.index_map,
        )
        if lost is not None:
            slot.count(*lost)


def _run_compiled(kind: Kind, slots: list[Slot], tables: Tables) -> tuple[np.ndarray, Table]:
    kernel, table = checked(kind), tables.of(slots)
    _point_at_gradients(table, slots)
    rows = {id(slot.constants): slot.constants for slot in slots}
    numbers = {key: row for row, key in enumerate(rows)}
    meter = np.zeros((len(table.chunks) if kind.metered or kind.peaks else 0, METER_COLUMNS))
    run_chunks(
        kernel,
        table.chunks[:, 2],
        table.chunks,
        table.pointers,
        np.array([numbers[id(slot.constants)] for slot in slots], np.int64),
        np.array(list(rows.values()), np.float32).reshape(len(rows), -1),
        _keys(kind, slots, table.keyed).view(np.uint32),
        meter,
    )
    if kind.metered:
        _count(meter, table.chunks, slots)
    return meter, table


def _run_triton(kind: Kind, slots: list[Slot], tables: Tables) -> bool:
    """The same on an accelerator; False where the kind's kernel cannot be used."""
    from ._triton_launch import launch, ready

    device = slots[0].gradient.device
    kernel = ready(kind, device, _trial)
    if kernel is None:
        return False
    table = tables.of(slots)
    _point_at_gradients(table, slots)
    constants = np.array([slot.constants for slot in slots], np.float32).reshape(len(slots), -1)
    keys = _keys(kind, slots, table.keyed)
    table.held, meter = launch(kind, kernel, device, table.chunks, table.pointers, constants, keys, table.held)
    if meter is not None:
        _count(meter, table.held.chunks, slots)
    return True


def _point_at_gradients(table: Table, slots: list[Slot]) -> None:
    pointers = table.pointers
    pointers[:, GRADIENT] = [slot.gradient.data_ptr() for slot in slots]
    if not pointers[:, GRADIENT].all():  # empty ones, and those that torch has not written out
        for row in np.flatnonzero(pointers[:, GRADIENT] == 0):
            slots[row].gradient = plain(slots[row].gradient, f"the gradient of {slots[row].name}")
            pointers[row, GRADIENT] = address(slots[row].gradient)
    for row, slot in enumerate(slots):
        for column, part in enumerate(slot.copied or ()):
            pointers[row, column] = address(part)


def _count(meter: np.ndarray, chunk_rows: np.ndarray, slots: list[Slot]) -> None:
    sums = np.zeros((len(slots), METER_COLUMNS))
    np.add.at(sums, chunk_rows[:, 0], meter)
    for slot, row in zip(slots, sums.tolist()):
        slot.count(*row)


def _keys(kind: Kind, slots: list[Slot], keyed: np.ndarray) -> np.ndarray:
    """uint64 array of shape (parameters, words): a key per parameter, step and random word."""
    seeds, identities = keyed[:, :, None]
    steps = np.array([slot.step for slot in slots], np.uint64)[:, None]
    return mix64_many(seeds, steps, identities, np.arange(draws_of(kind)[2], dtype=np.uint64)[None, :])


_checked: set[Kind] = set()


def checked(kind: Kind):
    """A kind's compiled kernel, compared with its reference before its first use in a process."""
    kernel = compiled(kind)
    kind = dataclasses.replace(kind, inside=False) if kind.inside else kind
    if kind not in _checked:
        check_bits(kind.name, lambda: _trial(kind, functools.partial(_run_numba, kernel)), lambda: _trial(kind))
        _checked.add(kind)
    return kernel


def _run_numba(kernel, table, pointers, constants, keys) -> np.ndarray:
    meter = np.zeros((len(table), METER_COLUMNS))
    kernel(0, len(table), table, pointers, np.zeros(1, np.int64), constants, keys.view(np.uint32), meter)
    return meter


def _trial(kind: Kind, run: Callable | None = None, device: torch.device | str = "cpu") -> list[torch.Tensor]:
    """Two steps on fixed elements, tiny, NaN and overwritten ones among them; returns all that was written.

    A scaled parameter takes another scale in the second.

    Args:
        kind: of step.
        run: (chunks, pointers, constants, keys) runs a compiled kernel; None for the reference.
        device: where the tensors lie.
    """
    count = 2 * (kind.block or 32)
    shape, index_map = torch.Size([count]), IndexMap((count,), (4 * CHUNK,), (CHUNK,), (1,))
    ramp = torch.linspace(-1, 1, count, dtype=torch.float32, device="cpu")
    value, gradient = ramp * ramp * ramp, ramp * ramp.abs().sqrt() * 3e-2
    value[5::16] *= 2.0**-128
    gradient[3::16] *= 2.0**-60
    gradient[7], gradient[9] = torch.nan, -0.0
    parts = [torch.zeros(shape, dtype=kind.store.dtype, device="cpu")]
    parts += [torch.zeros(shape, dtype=dtype, device="cpu") for _, dtype in kind.update.companions(kind.store)]
    kind.update.fill(kind.store, parts, value)
    parts[0][11], parts[0][12:14], parts[0][14] = torch.inf, 0.0, parts[0][30]  # as somebody else may have written them
    parts, gradient = [part.to(device) for part in parts], gradient.to(kind.gradient.dtype).to(device)
    states = [
        [torch.zeros(size, dtype=dtype, device=device) for size, dtype in codec.tensors("state", shape).values()]
        for codec in kind.codecs
    ]
    for k in kind.scaled_states:
        states[k][1].fill_(0.0625)
    constants = tuple(0.3 + 0.05 * position for position in range(len(kind.rule.constants)))
    keys = mix64_many(*(np.full((1, 1), value, np.uint64) for value in (1, 2, 3)), np.arange(draws_of(kind)[2])[None])
    pointers = [*map(address, parts), *[0] * (4 - len(parts)), address(gradient)]
    pointers += [address(tensor) for state in states for tensor in state]
    assert len(pointers) == pointer_count(kind)
    rule_constants = constants
    for new_scale in (0.125, 0.5):
        if kind.scaled:
            scales = (0.125, 1 / new_scale, 4.0, 0.125 / new_scale, new_scale)
            constants = (*rule_constants, *scales, *(0.0625, 16.0) * len(kind.scaled_states))
        if kind.peaks:
            row = np.array([constants], np.float32)
            given = (kind, parts, gradient, states, constants)
            found = reference_peaks(*given) if run is None else run(
                chunks(index_map, 0), np.array([pointers], np.int64), row, keys
            ).max(0)[: 1 + len(kind.scaled_states)]  # fmt: skip
            return [torch.tensor(found, dtype=torch.float32, device="cpu")]
        if run is None:
            reference_step(kind, parts, gradient, states, constants, [int(k) for k in keys[0]], index_map)
        else:
            row = np.array([constants], np.float32).reshape(1, -1)
            run(chunks(index_map, 0), np.array([pointers], np.int64), row, keys)
    return [tensor.cpu() for tensor in (*parts, *(tensor for state in states for tensor in state))]
