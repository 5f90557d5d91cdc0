"""Copies of a module's arguments in another dtype, and how what the module writes into them reaches the originals.

What was copied travels with the call's keyword arguments, from the hook before the call to the one after it: nothing
outlives the call, and calls inside it, or in other threads, have their own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Stands for an entry that a container has not.
_ABSENT = object()


class _Copy(NamedTuple):
    """A copy of an argument, or of what lies in one.

    Attributes:
        source: what was copied: a tensor, list, dict or data class.
        copy: what the module was given in its place.
        before: the copy's version counter when it was made, or its items by key.
        version: the source's version counter then; None where it has none.
    """

    source: Any
    copy: Any
    before: Any
    version: int | None


class CopiedArguments(dict):
    """Keyword arguments of a call that also know which arguments of the call are copies of the caller's.

    Args:
        kwargs: as the module is given them.
        given: all arguments as the caller gave them.
        made: the same as the module is given them.
    """

    def __init__(self, kwargs: dict, given: Any, made: Any) -> None:
        super().__init__(kwargs)
        self._copies = list({id(one.copy): one for one in _copies(given, made)}.values())

    def return_writes(self, cast: Callable[[Tensor, torch.dtype], Tensor]) -> None:
        """Give the caller's arguments what the module wrote into the copies of them.

        Args:
            cast: by which the copies were made.

        Raises:
            RuntimeError: a tensor was written both by another name and in its copy.
        """
        written = [one for one in self._copies if isinstance(one.copy, Tensor) and one.copy._version != one.before]
        for one in written:
            if one.version is not None and one.source._version != one.version:
                raise RuntimeError(
                    f"a module wrote into an argument of shape {tuple(one.source.shape)}, which it was given in "
                    f"{one.copy.dtype}, and into the caller's own {one.source.dtype} tensor (or another part of the "
                    "same memory) in one call: let it write by the argument alone, or give it the tensor in "
                    f"{one.copy.dtype}"
                )
        # All are compared before one is written: arguments may be parts of one tensor.
        with torch.no_grad():
            unchanged = [one.copy == cast(one.source, one.copy.dtype) for one in written]
        for one, same in zip(written, unchanged):
            # The gradient is the copy's everywhere: a product by a weight of 1 changes nothing, but has one.
            value = one.copy.to(one.source.dtype)
            with torch.no_grad():
                value.copy_(torch.where(same, one.source, value))
            one.source.copy_(value)
        originals = {id(one.copy): one.source for one in self._copies}
        for one in self._copies:
            if not isinstance(one.copy, Tensor):
                _return_items(one, originals)


def made_writable(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``x.to(dtype)``, with a version counter under torch.inference_mode too, where new tensors have none."""
    if not torch.compiler.is_compiling() and torch.is_inference_mode_enabled():
        with torch.inference_mode(False), torch.no_grad():
            return x.to(dtype)
    return x.to(dtype)


def _copies(given: Any, made: Any) -> Iterator[_Copy]:
    """Yield every copy in nested arguments."""
    if given is made:
        return
    if isinstance(given, Tensor):
        yield _Copy(given, made, made._version, None if given.is_inference() else given._version)
        return
    inner, now = _items(given), _items(made)
    for key, item in inner.items():
        yield from _copies(item, now[key])
    if not isinstance(given, tuple):
        yield _Copy(given, made, now, None)


def _items(container: Any) -> dict:
    """Return what lies in a list, tuple, dict or data class, by its key there."""
    if isinstance(container, dict):
        return dict(container)
    if isinstance(container, list | tuple):
        return dict(enumerate(container))
    declared = {field.name: getattr(container, field.name, None) for field in dataclasses.fields(container)}
    return declared | getattr(container, "__dict__", {})


def _return_items(one: _Copy, originals: dict[int, Any]) -> None:
    """Give a container the entries that were put into its copy, or taken out of it."""
    now = _items(one.copy)
    changed = {key: item for key, item in now.items() if one.before.get(key, _ABSENT) is not item}
    removed = [key for key in one.before if key not in now]
    if not changed and not removed:
        return
    if isinstance(one.source, list):
        one.source[:] = [originals.get(id(item), item) for item in one.copy]
        return
    for key in removed:
        del one.source[key]
    for key, item in changed.items():
        item = originals.get(id(item), item)
        if isinstance(one.source, dict):
            one.source[key] = item
        else:
            object.__setattr__(one.source, key, item)
