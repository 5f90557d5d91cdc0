"""The key of a tensor in torch's cache of compiled graphs: all that decides the graph of an operator on it."""

from __future__ import annotations

import functools
import hashlib
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

from . import _fallbacks as _fallback

_PACKAGE = __name__.partition(".")[0]
_PROCESS = uuid.uuid4().hex


class Flattens(Protocol):
    """A tensor subclass that names its inner tensors to compilers."""

    def __tensor_flatten__(self) -> tuple[list[str], Any]: ...


def graph_key(x: Flattens, rules: Iterable[Callable[..., Any]]) -> str:
    """Return the cache key of graphs of a tensor: its kind, its shapes, and the rules' sources.

    torch keeps compiled graphs between processes under its own tensors' properties. The graph of ours also follows from
    this library's code; with rules of somebody else's the graph is kept for this process alone, as their code, and what
    it closes over, may be another in the next.
    """
    names, context = x.__tensor_flatten__()
    foreign = any(rule.__module__.partition(".")[0] != _PACKAGE for rule in rules)
    kind = (type(x).__name__, _sources(), _PROCESS if foreign else "", bool(_fallback._strict), context)
    return repr((kind, _properties(x), [(name, _properties(getattr(x, name))) for name in names]))


def _properties(x: Any) -> tuple[object, ...]:
    layout = (x.dtype, x.shape, x.stride(), x.storage_offset(), x.device)
    return *layout, x.requires_grad, x.is_leaf, x.is_inference()


@functools.cache
def _sources() -> str:
    """Return a digest of this library's code."""
    found = hashlib.blake2b(digest_size=16)
    folder = Path(__file__).parents[1]
    for path in sorted(folder.rglob("*.py")):
        found.update(str(path.relative_to(folder)).encode())
        found.update(path.read_bytes())
    return found.hexdigest()
