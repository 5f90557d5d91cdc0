"""The tensors of two checkpoints side by side."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import torch
from torch import Tensor

from ..._messages import listed
from ...kernels import address, plain
from .._text import holds_numbers
from ..checkpoints._files import Checkpoint, Stored, map_pages
from ..checkpoints._names import COUNTERS
from . import _differences as d
from ._audit import Role, Side, Status, TensorAudit
from ._differences import AT_ONCE, Differences, add_differences, make_empty_differences

_COMPANION = re.compile(r"\.(component_[1-3]|component_scale|payload_scale)$")
_StoredPair = tuple[Stored, Stored]


def compare_tensors(a: Checkpoint, b: Checkpoint, parameters: set[str], share: float) -> dict[str, TensorAudit]:
    """Return how each tensor of A differs from that of its name in B.

    Args:
        parameters: names that an optimizer holds.
        share: below which mean change in ulps a tensor counts as barely moved.

    Raises:
        ValueError: they hold other names or shapes.
    """
    sides = _split_companions(a.tensors), _split_companions(b.tensors)
    _check_names(a, b, sides[0][0], sides[1][0])
    found = {}
    for name, before in sides[0][0].items():
        if name not in sides[1][0]:
            continue
        after = sides[1][0][name]
        beside = sides[0][1].get(name, {}), sides[1][1].get(name, {})
        found[name] = _compare(name, (before, after), beside, parameters, share)
    return found


def _split_companions(tensors: Mapping[str, Stored]) -> tuple[dict[str, Stored], dict[str, dict[str, Stored]]]:
    """Return tensors by name, and those beside them that hold a scale or further components."""
    bases: dict[str, Stored] = {}
    beside: dict[str, dict[str, Stored]] = {}
    for name, stored in tensors.items():
        match = _COMPANION.search(name)
        base = name[: match.start()] if match else ""
        if match and base in tensors:
            beside.setdefault(base, {})[match[1]] = stored
        else:
            bases[name] = stored
    return bases, beside


def _check_names(a: Checkpoint, b: Checkpoint, ours: dict[str, Stored], theirs: dict[str, Stored]) -> None:
    missing = [name for name in ours if name not in theirs and not _is_tied(a, name)]
    foreign = [name for name in theirs if name not in ours and not _is_tied(b, name)]
    # Averages are kept from some step on, by some runs.
    for which, names in (("A", missing), ("B", foreign)):
        averages = [name for name in names if name.startswith("ema.")]
        if averages:
            b.unseen.append(f"{listed(averages)} are averages that only {which} holds, and were not compared")
            names[:] = [name for name in names if not name.startswith("ema.")]
    if missing or foreign:
        said = [f"only A has {listed(missing)}"] if missing else []
        said += [f"only B has {listed(foreign)}"] if foreign else []
        raise ValueError(
            f"the checkpoints are of different models: {' and '.join(said)}; give two checkpoints of one run "
            f"(A = {a.path}, B = {b.path})"
        )
    shapes = [name for name in ours if name in theirs and ours[name].shape != theirs[name].shape]
    if shapes:
        first = shapes[0]
        raise ValueError(
            f"the checkpoints are of different models: {listed(shapes)} have other shapes ({first}: "
            f"{ours[first].shape} in A, {theirs[first].shape} in B); give two checkpoints of one run"
        )


def find_tied_names(checkpoint: Checkpoint, held: set[str]) -> dict[str, str]:
    """Return the further names of tensors that an optimizer holds under one name, with that name.

    Args:
        checkpoint: whose tensors share memory where they are tied.
        held: names that the optimizer holds.
    """
    by_shape: dict[tuple[int, ...], list[str]] = {}
    for name in held & checkpoint.tensors.keys():
        by_shape.setdefault(checkpoint.tensors[name].shape, []).append(name)
    found = {}
    for name, stored in checkpoint.tensors.items():
        others = by_shape.get(stored.shape, ()) if name not in held else ()
        place = _place(checkpoint, name) if others else None
        same = next((other for other in others if place is not None and _place(checkpoint, other) == place), None)
        if same is not None:
            found[name] = same
    return found


def _place(checkpoint: Checkpoint, name: str) -> object:
    """Return where in memory a tensor lies; None where its file tells nothing of ties."""
    stored = checkpoint.tensors[name]
    if not checkpoint.ordered or not stored.mapped or not stored.numel:
        return None
    return address(plain(stored.read(None)))


def _is_tied(checkpoint: Checkpoint, name: str) -> bool:
    """Return whether another name of the checkpoint leads to the same memory, as files without tied names leave out."""
    place, shape = _place(checkpoint, name), checkpoint.tensors[name].shape
    others = (key for key, other in checkpoint.tensors.items() if key != name and other.shape == shape)
    return place is not None and any(_place(checkpoint, other) == place for other in others)


def _compare(
    name: str,
    pair: _StoredPair,
    beside: tuple[dict[str, Stored], dict[str, Stored]],
    parameters: set[str],
    share: float,
) -> TensorAudit:
    if all(one.dtype.is_complex for one in pair):
        a, b = (_real_parts(one) for one in pair)
    else:
        a, b = pair
    numbers = all(holds_numbers(one.dtype) for one in (a, b))
    found = measure_differences(a, b) if numbers else make_empty_differences()
    unchanged = int(found.counts[d.SAME]) if numbers else count_same_elements(a, b)
    moved = None if not beside[0] and not beside[1] else _has_moved(*beside)
    before = _side(pair[0].dtype, a, found, d.A_NAN, 0, _storage(beside[0]), numbers)
    after = _side(pair[1].dtype, b, found, d.B_NAN, 1, _storage(beside[1]), numbers)
    mean = found.mean()
    return TensorAudit(
        name,
        pair[0].shape,
        a.numel,
        _role(name, numbers, parameters),
        before,
        after,
        unchanged,
        found.histogram(),
        mean,
        found.median(),
        found.largest if found.counts[d.FINITE] else math.nan,
        moved,
        _status(before, after, unchanged == a.numel and not moved, mean < share and not moved),
    )


def _status(a: Side, b: Side, still: bool, little: bool) -> Status:
    if b.nonfinite > a.nonfinite:
        return "nonfinite"
    if a.dtype != b.dtype:
        return "dtype-changed"
    if still:
        return "unchanged"
    if little:
        return "barely-moved"
    return "constant" if b.constant is not None and a.constant is None else "changed"


def _real_parts(stored: Stored) -> Stored:
    """Return a complex tensor as its real and imaginary parts, in one more dimension."""

    def read(rows: slice | None) -> Tensor:
        return torch.view_as_real(stored.read(rows).resolve_conj())

    return Stored(stored.dtype.to_real(), (*stored.shape, 2), read, stored.mapped)


def _role(name: str, numbers: bool, parameters: set[str]) -> Role:
    if name in parameters:
        return "parameter"
    if not numbers:
        return "buffer"
    return "average" if name.startswith("ema.") or name.rpartition(".")[2] in COUNTERS else "unknown"


def _side(
    dtype: torch.dtype, stored: Stored, found: Differences, place: int, which: int, storage: str, numbers: bool
) -> Side:
    if not numbers or not stored.numel:
        return Side(dtype, storage=storage)
    nan, infinite, zeros, top, varies = (int(count) for count in found.counts[place : place + 5])
    constant = None
    if stored.numel > 1 and found.first is not None and not nan:
        constant = 0.0 if zeros == stored.numel else None if varies else found.first[which]
    return Side(dtype, nan, infinite, zeros, top, constant, storage)


def _storage(beside: Mapping[str, Stored]) -> str:
    components = sum(key.startswith("component_") and key != "component_scale" for key in beside)
    if components:
        return f"{1 + components} components"
    return "scaled" if beside else "plain"


def _has_moved(a: Mapping[str, Stored], b: Mapping[str, Stored]) -> bool:
    if a.keys() != b.keys():
        return True
    return any(count_same_elements(a[key], b[key]) < a[key].numel for key in a)


def measure_differences(a: Stored, b: Stored) -> Differences:
    """Return how two stored tensors of floating-point numbers and one shape differ, read in parts where they must."""
    found = make_empty_differences()
    whole = a.mapped and b.mapped and all(one.read(None).is_contiguous() for one in (a, b))
    native = all(one.dtype not in (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz) for one in (a, b))
    if whole and native:
        for tensor in (parts := [one.read(None) for one in (a, b)]):
            map_pages(tensor)
        add_differences(found, *parts)
        return found
    for rows in a.rows(AT_ONCE):
        add_differences(found, a.read(rows), b.read(rows))
    return found


def count_same_elements(a: Stored, b: Stored) -> int:
    """Return how many elements of two stored tensors of one shape are equal, NaN being equal to none."""
    if a.shape != b.shape:
        return 0
    return sum(int((_comparable(a.read(rows)) == _comparable(b.read(rows))).sum()) for rows in a.rows(AT_ONCE))


def _comparable(x: Tensor) -> Tensor:
    if x.dtype.is_floating_point and x.dtype.itemsize == 1:
        return x.view(torch.uint8)
    return x.float() if x.dtype in (torch.uint16, torch.uint32) else x
