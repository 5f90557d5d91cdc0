"""The map's data: histograms of magnitudes by tensor, and where each candidate format's numbers begin and end."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, get_args

from ... import formats
from ..record._record import Role
from ._words import dtype_word


def map_data(tensors: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what the map's script reads: tensors, formats and roles, those with samples alone.

    Args:
        tensors: as `plain_record` gives them.
    """
    rows = [_tensor(one) for one in tensors if one["sampled"]]
    named = list(dict.fromkeys(name for row in rows for name in row["formats"]))
    present = {row["role"] for row in rows}
    order = {role: place for place, role in enumerate(get_args(Role))}
    return {
        "tensors": sorted(rows, key=lambda row: row["order"]),
        "formats": [format_limits(name) for name in named],
        "format": 0,
        "roles": sorted(present, key=lambda role: order.get(role, len(order))),
    }


def _tensor(one: Mapping[str, Any]) -> dict[str, Any]:
    smallest = one["amin"]
    return {
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


def format_limits(name: str) -> dict[str, Any]:
    """Return where a format's magnitudes begin and end, as powers of two under rounding to nearest.

    `zero` is the power below which all becomes zero, `normal` that from which numbers are normal, `over` the logarithm
    of the smallest magnitude beyond the largest number; a format in blocks, whose limits move with its scales, and one
    that is not known here have `block` alone.

    >>> limits = format_limits("fp16")
    >>> limits["zero"], limits["normal"], round(limits["over"], 4)
    (-25, -14, 15.9996)
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
    }
