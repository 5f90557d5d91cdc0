"""torch.autograd.Function inside a region: function modes do not see it, so its ``apply`` is watched.

torch offers no other place where the arguments of a custom Function can be replaced before it runs, and they must be:
its backward has to see gradients at the global exponent, and what reentrant checkpointing runs again needs edges of its
own. So ``apply`` of the common base class is replaced, for the whole process, but only during forward passes of a
scaler whose iterations have met a custom Function, or in its first iteration, which may; other threads, and whatever
runs outside of a region, go straight through.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd.function import Function, _SingleLevelFunction
from torch.overrides import _get_current_function_mode_stack
from torch.utils import checkpoint

from ._backward import Backward, Widening
from ._current_region import current
from ._region import Region
from ._strides import CopyWithStrides

# Its ``apply`` is inherited from a class in C++.
_BASE: Any = _SingleLevelFunction
_lock = threading.Lock()
_watching = 0


@contextlib.contextmanager
def watched(backward: Backward) -> Iterator[None]:
    """While any thread is in here, custom Functions that are applied in a region go through it.

    What is replaced is the method that ``Function.apply`` ends in, which names bound to an ``apply`` before reach too.
    Nothing is where a whole iteration met no custom Function; a region finds those that come later by their nodes.
    """
    global _watching
    if backward.custom_functions is False:
        yield
        return
    with _lock:
        _watching += 1
        _BASE.apply = classmethod(_apply)
    try:
        yield
    finally:
        with _lock:
            _watching -= 1
            if not _watching:
                del _BASE.apply


def _apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
    apply = super(_BASE, cls).apply
    region = current()
    if region is None or region.replaying or not torch.is_grad_enabled() or cls in (Widening, CopyWithStrides):
        return apply(*args, **kwargs)
    if cls is checkpoint.CheckpointFunction:
        args = (_replayed(args[0], region), *args[1:])
    region._backward.custom_functions = True
    if region not in _get_current_function_mode_stack():
        # A part of an operator that the region runs now (torch.library.register_autograd), which has a site already.
        region._fail_recording()
        return apply(*args, **kwargs)
    # A Function may do with gradients what it likes: it sees those of the global exponent, as under any loss scale.
    return region.at_global_exponent(lambda moved: apply(*moved, **kwargs), args)


def _replayed(run: Callable[..., Any], region: Region) -> Callable[..., Any]:
    """The function that reentrant checkpointing runs again during backward, with edges of its own."""

    def run_in_region(*args: Any, **kwargs: Any) -> Any:
        if current() is not None or not torch.is_grad_enabled():
            return run(*args, **kwargs)
        region.note_replay()
        with watched(region._backward), region.again() as replay:
            return replay.leave(run(*args, **kwargs), wide=False)

    return run_in_region
