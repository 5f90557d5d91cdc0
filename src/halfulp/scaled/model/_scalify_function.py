"""Functions, or whole training steps, that compute on scaled tensors."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

import torch
from torch.utils._pytree import tree_leaves, tree_map

from .._dtypes import check_storage
from .._scaled_tensor import ScaledTensor
from .._storage_rules import WideMode, check_wide, home_for
from ._input_boundary import encode_arguments

Given = TypeVar("Given", bound=Callable[..., Any])


def scalify_function(function: Given, dtype: torch.dtype = torch.float16, wide: WideMode = "autocast") -> Given:
    """Return a function that encodes its floating arguments when called, except those with "mask" in their names.

    What comes out is as what went in: with plain arguments the scaled tensors among the results, however nested, are
    decoded, so that the function can stand in for the other; if an argument is a ScaledTensor they stay scaled.
    Gradients flow through both. Tensors that the function closes over are used as they are: scalify a model that it
    trains, and plain tensors are encoded where they meet scaled ones.

    Args:
        function: any callable, such as a loss, or a training step that calls backward and an optimizer.
        dtype: of the payloads: float16, bfloat16, float8_e4m3fn, float8_e5m2 or float32.
        wide: which results keep a float32 payload, as in `scalify`.

    Raises:
        TypeError: not callable.
        ValueError: no storage dtype, or another wide.

    >>> f = scalify_function(lambda x: (x * 3).relu())
    >>> f(torch.tensor([1e-6, -2e-6]))
    tensor([3.0007e-06, 0.0000e+00])
    >>> f(ScaledTensor.encode(torch.tensor([1.0, 2.0])))
    ScaledTensor([3., 6.], scale=2^3, payload=torch.float16)
    """
    check_storage(dtype)
    check_wide(wide)
    if not callable(function):
        raise TypeError(f"scalify takes a module or a function, got {type(function).__name__}")

    like = ScaledTensor(torch.ones((), dtype=torch.float32, device="cpu"), 1.0, home=home_for(dtype, wide))
    positions = _positional_names(function)

    def names() -> Iterator[str]:
        return itertools.chain(positions, itertools.repeat(""))

    @functools.wraps(function)
    def scaled(*arguments: Any, **options: Any) -> Any:
        stays = any(isinstance(x, ScaledTensor) for x in tree_leaves((arguments, options)))
        arguments = tuple(
            x if "mask" in name else encode_arguments(x, dtype, like) for x, name in zip(arguments, names())
        )
        options = {name: x if "mask" in name else encode_arguments(x, dtype, like) for name, x in options.items()}
        results = function(*arguments, **options)
        if stays:
            return results
        return tree_map(lambda x: x.decode() if isinstance(x, ScaledTensor) else x, results)

    return cast(Given, scaled)


def _positional_names(function: Callable[..., Any]) -> list[str]:
    """Return the names of positional arguments, as far as the function's signature gives them."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (ValueError, TypeError):
        return []
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
