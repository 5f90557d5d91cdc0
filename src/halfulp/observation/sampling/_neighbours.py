"""Code on neighbours in memory, sixteen at a time and then one by one: what is counted of them, or found."""

from __future__ import annotations

import operator
from typing import Any

from ...kernels import Memory, Number, gathered

LANES = 16
MAGNITUDE, NORMALS, FIELD = 0x7FFFFFFF, 0x800000, 23


def sizes(sample: Number, i: Any, lanes: int) -> Number:
    """Return float32 numbers as words, their signs left out."""
    return sample.code.memory(sample, sample.code.i32).lanes(i, lanes) & MAGNITUDE


def below(sample: Number, taken: Number, threshold: Number) -> Number:
    """Count the magnitudes below a word that is no negative number's."""
    code, limit = sample.code, threshold & MAGNITUDE
    begin = code.number(0, code.i32)

    def turn(i: Number, lanes: int) -> list[Number]:
        return [(sizes(sample, i, lanes) < limit).to(code.i32)]

    (found,) = gathered(code.number(0), taken, LANES, [begin], (operator.add,), turn)
    return found.to(code.i64)


def bump(integers: Memory, k: Any, by: Any) -> None:
    """Add to an integer in memory."""
    integers[k] += by
