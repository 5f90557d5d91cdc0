"""Qualified names of parameters and modules: those that differ in numbers alone as one pattern."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Sequence

_NUMBER_IN_NAME = re.compile(r"(?<![^.])\d+(?![^.])")


def make_name_pattern(name: str) -> str:
    """Return a qualified name with * for each number between its dots.

    >>> make_name_pattern("layers.11.norm.weight"), make_name_pattern("conv1.weight")
    ('layers.*.norm.weight', 'conv1.weight')
    """
    return _NUMBER_IN_NAME.sub("*", name)


def join_numbered_names(names: Sequence[str]) -> str:
    """Return names that differ in numbers alone as one word: the numbers in braces, or how many names there are.

    >>> join_numbered_names(["layers.3.norm", "layers.4.norm", "layers.5.norm", "layers.9.norm"])
    'layers.{3-5,9}.norm'
    >>> join_numbered_names(["layers.0.experts.1", "layers.3.experts.2"]), join_numbered_names(["head"])
    ('layers.*.experts.* (2)', 'head')
    """
    numbers = {tuple(map(int, _NUMBER_IN_NAME.findall(name))) for name in names}
    columns = [sorted(set(column)) for column in zip(*numbers)]
    if math.prod(map(len, columns)) != len(numbers):
        return f"{make_name_pattern(names[0])} ({len(numbers)})"
    words = iter(columns)
    return _NUMBER_IN_NAME.sub(lambda found: _write_number_ranges(next(words)), names[0])


def _write_number_ranges(numbers: Iterable[int]) -> str:
    """Return increasing numbers in braces, neighbours as a range; a single one as it is."""
    runs = [list(run) for _, run in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    said = [f"{run[0][1]}-{run[-1][1]}" if len(run) > 2 else ",".join(str(n) for _, n in run) for run in runs]
    return said[0] if said[0].isdigit() and len(said) == 1 else f"{{{','.join(said)}}}"
