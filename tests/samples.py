"""Samples of the cases that a whole law has, drawn by the run's seed; HALFULP_TEST_WHOLE keeps all.

benchmarks/bench_processors.py sets it, and runs the tests of bits that take samples.
"""

import collections
import os
import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")
IS_WHOLE = "HALFULP_TEST_WHOLE" in os.environ


def _chooser(of: object) -> random.Random:
    return random.Random(f"{os.environ.get('HALFULP_TEST_SEED', 0)} {of}")


def covering(rows: Sequence[tuple], times: int = 2, of: object = "") -> list[tuple]:
    """Rows such that every value occurs so many times in its column, where it occurs as often at all."""
    if IS_WHOLE:
        return [*rows]
    order = _chooser(of).sample(rows, len(rows))
    left = collections.Counter({value: times for row in rows for value in enumerate(row)})
    kept = []
    for row in order:
        if any(left[value] > 0 for value in enumerate(row)):
            left.subtract(enumerate(row))
            kept.append(row)
    return kept


def drawn(values: Sequence[T], count: int, of: object = "") -> list[T]:
    """So many of some values that are alike, in their order; all under the whole law."""
    kept = _chooser(of).sample(range(len(values)), len(values) if IS_WHOLE else count)
    return [values[place] for place in sorted(kept)]


def matched(values: Sequence[T], of: object = "") -> dict[T, list[T]]:
    """A partner for each of some values, each value once; all values under the whole law."""
    partners = _chooser(of).sample(values, len(values))
    return {value: [*values] if IS_WHOLE else [partner] for value, partner in zip(values, partners)}
