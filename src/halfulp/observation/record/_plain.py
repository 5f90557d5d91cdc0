"""A record as plain data that JSON can hold."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from ._record import ParameterRecord, Realised, Record


def plain(value: Any) -> Any:
    """Return what a record holds as dicts, lists, numbers, strings, booleans and None.

    A dtype becomes its name, a number that JSON has no word for becomes "inf", "-inf" or "nan", a tuple a list; records
    keyed by name become lists, since each holds its name. Of a `Realised` the two shares stand beside its counts.

    >>> from halfulp.observation.record._record import Realised, TensorRecord
    >>> plain(Realised(seen=4, cancelled=3, wanted=2.0, kept=0.5))["lost_share"]
    0.75
    >>> entry = plain(TensorRecord("weight", "head.weight", "Linear", torch.bfloat16, histogram={-3: 7}))
    >>> entry["dtype"], entry["histogram"], entry["amin"]
    ('bfloat16', {'-3': 7}, 'inf')
    """
    if isinstance(value, Record):
        return plain_record(value)
    if is_dataclass(value) and not isinstance(value, type):
        found = {field.name: plain(getattr(value, field.name)) for field in fields(value)}
        if isinstance(value, Realised):
            found |= {"lost_share": plain(value.lost_share), "realised_share": plain(value.realised_share)}
        return found
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, bool | int | str) or value is None:
        return value
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    return str(value)


def plain_record(record: Record) -> dict[str, Any]:
    """Return a record as plain data: its fields, with `parameters`, `tensors` and `averages` as lists.

    Of a group's options the numbers stay, since the page and the contract need those alone.
    """
    found = {field.name: getattr(record, field.name) for field in fields(record)}
    found["parameters"] = [_parameter(parameter) for parameter in record.parameters.values()]
    for keyed in ("tensors", "averages"):
        found[keyed] = list(found[keyed].values())
    return {key: plain(value) for key, value in found.items()}


def _parameter(parameter: ParameterRecord) -> dict[str, Any]:
    found: dict[str, Any] = plain(parameter)
    found["options"] = {key: value for key, value in found["options"].items() if _numeric(value)}
    return found


def _numeric(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_numeric, value))
    return isinstance(value, int | float) or value is None
