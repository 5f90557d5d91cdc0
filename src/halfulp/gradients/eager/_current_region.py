"""The region that is active on a thread, and the treatment of parts of its model that are compiled alone."""

from __future__ import annotations

import functools
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ...kernels import constant_result

COMPILED = (
    "a part of the model is compiled by itself, and exponents cannot be put into its backward pass: compile the whole "
    'model with torch.compile(model, backend=scaler.backend("inductor")), or do not compile the part'
)
_local = threading.local()
# Sets and returns what is not None while something that torch.compile was given runs. The function that only returns it
# gives up a reference to it each time in torch 2.6, until Python crashes.
_set_dynamo = torch._C._dynamo.eval_frame.set_eval_frame
# Whose users have been warned.
_warned: weakref.WeakSet = weakref.WeakSet()


def current() -> Any:
    """The region, or the replay of a known graph, that this thread is in; None outside of both."""
    return getattr(_local, "region", None)


def put(region: Any) -> None:
    """Set the active region or replay of this thread; None for neither."""
    _local.region = region


def by_itself() -> bool:
    """Whether a part of the model that is compiled by itself runs. Dynamo, when it traces this, gives the part up.

    Raises:
        NotImplementedError: in dynamo, which runs the part uncompiled then.
    """
    if torch.compiler.is_dynamo_compiling():
        _warn()
        raise NotImplementedError(COMPILED)
    callback = _set_dynamo(None)
    if callback is None:
        return False
    _set_dynamo(callback)
    _warn()
    return True


# Dynamo calls it as it traces.
@constant_result
def _warn() -> None:
    region = current()
    if region is not None and region._backward not in _warned:
        _warned.add(region._backward)
        given_up = "It runs uncompiled, as the whole does where torch.compile has given that up (said once)"
        warnings.warn(f"{COMPILED}. {given_up}", stacklevel=4)


def unwatched(method: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a region's method so that the torch functions it calls are not watched."""

    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        if by_itself():
            return torch.compiler.disable(run)(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            return method(*args, **kwargs)

    return run
