"""Options as a command line or a YAML file spells them: "1e-3", "bf16", "true", "0.9,0.95"."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from .._names import unknown

DTYPES = {
    **dict.fromkeys(("bf16", "bfloat16"), torch.bfloat16),
    **dict.fromkeys(("fp16", "float16", "half"), torch.float16),
    **dict.fromkeys(("fp32", "float32", "float"), torch.float32),
}
_SWITCHES = {"true": True, "false": False}
# Options whose words are names, and stay.
_NAMES = frozenset(("weight_update", "format", "name"))


def read_dtype(given: Any) -> Any:
    """Return the dtype that a word names; return anything else, such as "8bit", unchanged.

    >>> read_dtype("torch.bfloat16"), read_dtype("fp16"), read_dtype("8bit")
    (torch.bfloat16, torch.float16, '8bit')
    """
    return DTYPES.get(given.strip().lower().removeprefix("torch."), given) if isinstance(given, str) else given


def read_defaults(make: Callable[..., Any]) -> dict[str, Any]:
    """Return the default values of a class's or function's arguments, which tell of what type each is.

    Of a class they are also those of the classes that it inherits from, to which it may hand on `**options`.
    """
    makers = [make]
    if isinstance(make, type):  # an __init__ that is made in C has no defaults
        makers = [init for kind in reversed(make.__mro__) if inspect.isfunction(init := vars(kind).get("__init__"))]
    found: dict[str, Any] = {}
    for maker in makers:
        parameters = inspect.signature(maker).parameters.values()
        found |= {one.name: one.default for one in parameters if one.default is not inspect.Parameter.empty}
    return found


def read_options(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return options as values, where some may be words for them.

    Args:
        given: the options.
        defaults: values of the same names, whose types are those of the options.

    Raises:
        ValueError: a word that is no value of its option's type.

    >>> read_options({"lr": "1e-3", "betas": "0.9,0.95", "param_dtype": "bf16"}, {"lr": 0.1, "betas": (0.9, 0.999)})
    {'lr': 0.001, 'betas': (0.9, 0.95), 'param_dtype': torch.bfloat16}
    """
    return {name: _read(name, value, defaults.get(name)) for name, value in given.items()}


def _read(name: str, given: Any, default: Any) -> Any:
    if name == "state_dtype" and isinstance(given, Mapping):
        return {slot: read_dtype(choice) for slot, choice in given.items()}
    if isinstance(given, list | tuple) and isinstance(default, tuple | list):
        return tuple(_read_item(name, one) if isinstance(one, str) else one for one in given)
    if not isinstance(given, str):
        return given
    word = given.strip()
    if word == "None":
        return None
    if name in ("param_dtype", "state_dtype", "dtype"):
        found = read_dtype(word)
        if name == "param_dtype" and isinstance(found, str):
            raise ValueError(unknown("param_dtype", word, ["bf16", "bfloat16", "fp16", "float16", "None"]))
        return found
    if name in _NAMES:
        return word
    if isinstance(default, bool):
        if word.lower() not in _SWITCHES:
            raise ValueError(f"{name}={given!r}: write True or False")
        return _SWITCHES[word.lower()]
    if isinstance(default, tuple | list):
        return tuple(_read_item(name, one) for one in word.strip("()[] ").split(",") if one.strip())
    if default is None:
        return _SWITCHES.get(word.lower(), given) if _number(word) is None else _number(word)
    return _read_item(name, word) if isinstance(default, int | float) else given


def _read_item(name: str, word: str) -> float | None:
    if word.strip() == "None":
        return None
    value = _number(word)
    if value is None:
        raise ValueError(f"{name}={word!r} is no number: write it as 0.001 or 1e-3")
    return value


def _number(word: str) -> float | None:
    """Return the number that a word writes, as Python does, or infinity; None for any other word."""
    if word.strip() in ("inf", "-inf"):
        return float(word)
    try:
        value = ast.literal_eval(word.strip())
    except (SyntaxError, ValueError):
        return None
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None
