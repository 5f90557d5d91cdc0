"""A record as plain data that JSON can hold."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch

from ._record import Record


def record_to_dict(record: Record) -> dict[str, Any]:
    """Return a record as dicts, lists, strings and numbers.

    `parameters` and `averages` are lists of objects with a name, and `tensors` one of objects with a role and a name;
    dtypes are names without "torch."; NaN and infinities, which JSON has no word for, are strings.

    >>> record_to_dict(Record(loss_dtype=torch.bfloat16))["loss_dtype"]
    'bfloat16'
    """
    found = {field.name: _plain(getattr(record, field.name)) for field in dataclasses.fields(record)}
    for name in ("parameters", "tensors", "averages"):
        found[name] = [_plain(item) for item in getattr(record, name).values()]
    return found


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return value if isinstance(value, bool | int | str) or value is None else str(value)
