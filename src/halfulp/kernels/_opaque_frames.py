"""Functions whose frames torch.compile leaves alone, with all that they call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from .._torch_versions import skip_frames

Function = TypeVar("Function", bound=Callable)


def untraced(function: Function) -> Function:
    """Let torch.compile never capture a function's own frames, as a decorator that costs a call nothing.

    Between the graphs of a compiled function, frames that torch itself enters (`__torch_dispatch__`, rules, hooks of
    autograd) look like the user's, and would be captured like those: with tensors in them that are only half made. What
    a graph calls is traced as ever. torch.compiler.disable does this at 2 us a call, and imports the compiler.

    >>> untraced(len.__call__) is len
    Traceback (most recent call last):
        ...
    TypeError: untraced takes a Python function, got method-wrapper
    """
    if not hasattr(function, "__code__"):
        raise TypeError(f"untraced takes a Python function, got {type(function).__name__}")
    return cast(Function, skip_frames(function))


def uncompiled(function: Function) -> Function:
    """Decorate a function that torch.compile is to run eagerly, breaking its graph there.

    What torch.compiler.disable marks its wrapper with, without the wrapper.
    """
    marked: Any = untraced(function)
    marked._torchdynamo_disable = True
    marked._torchdynamo_disable_msg = f"{function.__qualname__} of halfulp runs uncompiled"
    return cast(Function, marked)


def constant_result(function: Function) -> Function:
    """Let torch.compile call a function of constants as it traces and take the result for a constant, as a decorator.

    torch.compiler.assume_constant_result, which imports the compiler, without the import.
    """
    marked: Any = function
    marked._dynamo_marked_constant = True
    return function
