"""The targets of formats while a compiler traces: constants of the graph, as those of names are.

Of an object that is an argument, a compiler makes an integer field a variable once it has seen two values of it, and
`Format.max` is no arithmetic of variables. A string is compared as a whole, and a target is made of it outside the
trace. What that raises is raised inside the trace, where a graph can break and the caller sees it as it is.
"""

from __future__ import annotations

from ast import literal_eval

import torch

from ..formats import BlockFormat, Format
from ..kernels import constant_result
from ._modes import Rounding, get_rounding
from ._target import Target, make_target
from .blocks._table import BlockTarget, make_block_target

_ERRORS: dict[str, type[Exception]] = {kind.__name__: kind for kind in (NotImplementedError, TypeError, ValueError)}


def traced_target(format: Format, rounding: Rounding, overflow: str | None, dtype: torch.dtype) -> Target | None:
    """`make_target`, guarded by all fields of the format."""
    flat, error, message = _target(format._key, rounding.name, overflow, dtype)
    if error:
        raise _ERRORS[error](message)
    return Target(*flat) if flat else None


def traced_block_target(
    format: BlockFormat, rounding: Rounding, overflow: str | None, dtype: torch.dtype
) -> BlockTarget:
    """`make_block_target`, guarded by all fields of the block format and of the two formats in it."""
    flat, error, message = _block_target(format._key, rounding.name, overflow, dtype)
    if error:
        raise _ERRORS[error](message)
    return BlockTarget.of(list(flat))


Made = tuple[tuple[int, ...], str, str]


@constant_result
def _target(key: str, rounding: str, overflow: str | None, dtype: torch.dtype) -> Made:
    try:
        return tuple(make_target(_format(key), get_rounding(rounding), overflow, dtype) or ()), "", ""
    except tuple(_ERRORS.values()) as error:
        return (), type(error).__name__, str(error)


@constant_result
def _block_target(key: str, rounding: str, overflow: str | None, dtype: torch.dtype) -> Made:
    name, element, scale, *rest = literal_eval(key)
    format = BlockFormat(name, _format(element), _format(scale), *rest)
    try:
        return tuple(make_block_target(format, get_rounding(rounding), overflow, dtype).flat()), "", ""
    except tuple(_ERRORS.values()) as error:
        return (), type(error).__name__, str(error)


def _format(key: str) -> Format:
    return Format(*literal_eval(key))
