"""The map's data: histograms of magnitudes by tensor, and where each candidate format's numbers begin and end."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

from ... import formats
from .._record import Role
from ._words import dtype_word

Plain = Mapping[str, Any]


def map_data(
    tensors: Iterable[Plain], parameters: Iterable[Plain] = (), role: str = "", where: Sequence[str] = ()
) -> dict[str, Any]:
    """Return what the map's script reads: tensors, formats and roles, those with samples alone, and where it opens.

    It opens on the tensors of the first cause, in the format that stores them, the most lost first.

    Args:
        tensors: as `plain_record` gives them.
        parameters: likewise, for what rounding their updates lost.
        role: of the tensors that show the first cause; empty without one.
        where: its names, of these tensors or of modules around them.
    """
    sampled = [one for one in tensors if one["sampled"]]
    held = {one["name"]: one for one in parameters}
    weights = {one["name"]: _median(one["histogram"]) for one in sampled if one["role"] == "weight"}
    rows = [_tensor(one, held.get(one["name"]), weights.get(one["name"])) for one in sampled]
    named = list(dict.fromkeys(name for row in rows for name in row["formats"]))
    order = {role: place for place, role in enumerate(get_args(Role))}
    roles = sorted({row["role"] for row in rows}, key=lambda role: order.get(role, len(order)))
    for row in rows:
        row["found"] = row["role"] == role and any(_lies_in(row["name"], one) for one in where)
    found = any(row["found"] for row in rows)
    return {
        "tensors": sorted(rows, key=lambda row: row["order"]),
        "formats": [format_limits(name) for name in named],
        "stored": {role: _stored([row for row in rows if row["role"] == role]) for role in roles},
        "roles": roles,
        "role": role if found else (roles[0] if roles else ""),
        "order": "lost" if found else "model",
    }


def _lies_in(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")


def _stored(rows: Sequence[Plain]) -> str:
    """The format that stores the tensors of the first cause among rows, or most of the rows."""
    found = [row for row in rows if row["found"]] or rows
    return Counter(row["dtype"] for row in found).most_common(1)[0][0]


def _tensor(one: Plain, parameter: Plain | None, weight: int | None) -> dict[str, Any]:
    smallest = one["amin"]
    row = {
        "role": one["role"],
        "name": one["name"],
        "kind": one["kind"],
        "dtype": dtype_word(one["dtype"]),
        "order": one["order"],
        "sampled": one["sampled"],
        "elements": one["elements"],
        "nonfinite": one["nonfinite"],
        "amax": one["amax"],
        "amin": smallest if isinstance(smallest, int | float) and math.isfinite(smallest) else 0,
        "bins": sorted([int(bin), many] for bin, many in one["histogram"].items()),
        "formats": {
            name: [counts["elements"], counts["underflow"], counts["subnormal"], counts["overflow"]]
            for name, counts in one["formats"].items()
        },
    }
    if row["dtype"] not in row["formats"] and one.get("scale", 1.0) == 1.0:
        row["formats"] |= _as_stored(row)
    if one["role"] == "update" and parameter is not None and parameter["update"]["seen"]:
        row["lost"] = [parameter["update"]["seen"], parameter["update"]["cancelled"]]
        if parameter["weight_update"] == "nearest" and parameter.get("rounding") is None and weight is not None:
            row["weight"] = weight
    return row


def _as_stored(row: Plain) -> dict[str, list[int]]:
    """Counts in the format that holds the numbers, which are there: none became zero or overflowed."""
    try:
        smallest = formats.get(row["dtype"]).emin
    except ValueError:
        return {}
    return {row["dtype"]: [row["sampled"], 0, sum(many for bin, many in row["bins"] if bin < smallest), 0]}


def _median(histogram: Mapping[str, int]) -> int | None:
    """The power of two of the median of magnitudes."""
    left = sum(histogram.values()) / 2
    for bin, many in sorted((int(bin), many) for bin, many in histogram.items()):
        left -= many
        if left <= 0:
            return bin
    return None


def format_limits(name: str) -> dict[str, Any]:
    """Return where a format's magnitudes begin and end, as powers of two under rounding to nearest.

    `zero` is the power below which all becomes zero, `normal` that from which numbers are normal, `over` the logarithm
    of the smallest magnitude beyond the largest number, `digits` the bits of a number behind its first; a format in
    blocks, whose limits move with its scales, and one that is not known here have `block` alone.

    >>> limits = format_limits("fp16")
    >>> limits["zero"], limits["normal"], round(limits["over"], 4), limits["digits"]
    (-25, -14, 15.9996, 10)
    >>> format_limits("mxfp8_e4m3")
    {'name': 'mxfp8_e4m3', 'title': 'mxfp8_e4m3: blocks of 32 elements', 'block': True}
    """
    if name in formats.block_names():
        blocks = formats.get_block(name).block
        return {"name": name, "title": f"{name}: blocks of {blocks} elements", "block": True}
    try:
        found = formats.get(name)
    except ValueError:
        return {"name": name, "title": name, "block": True}
    half_ulp = math.ldexp(0.5, found.emax - found.mantissa_bits)
    return {
        "name": name,
        "title": f"{name}: {found.smallest_subnormal:.3g} to {found.max:.6g}",
        "block": False,
        "zero": math.frexp(found.smallest_subnormal)[1] - 2,
        "normal": found.emin,
        "over": math.log2(found.max) if math.isinf(found.max + half_ulp) else math.log2(found.max + half_ulp),
        "digits": found.mantissa_bits,
    }
