"""Qualified names of parameters and modules: those that differ in numbers alone as one pattern."""

from __future__ import annotations

import re

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def pattern_of(name: str) -> str:
    """Return a qualified name with * for each number between its dots.

    >>> pattern_of("layers.11.norm.weight"), pattern_of("conv1.weight")
    ('layers.*.norm.weight', 'conv1.weight')
    """
    return _NUMBER.sub("*", name)
