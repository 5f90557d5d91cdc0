"""Which dtypes payloads, values and homes may have, and which one a result takes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

STORAGES = (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float32)
LOGICALS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2)
_WIDTH = {torch.float8_e4m3fn: 0, torch.float8_e5m2: 0, torch.float16: 1, torch.bfloat16: 1, torch.float32: 2}


def check_storage(dtype: object) -> torch.dtype:
    """Raise unless payloads can have this dtype."""
    if not isinstance(dtype, torch.dtype) or dtype not in STORAGES:
        raise ValueError(f"dtype={dtype}: a payload is one of {', '.join(map(str, STORAGES))}")
    return dtype


@dataclass(frozen=True)
class Transient:
    """The home of a float32 result that lives within one formula, and outside of it is rounded to a storage."""

    storage: torch.dtype


def check_home(home: object) -> torch.dtype | None:
    """Raise unless tensors can have this home."""
    if home is None:
        return None
    if not isinstance(home, torch.dtype) or home not in (torch.float16, torch.bfloat16):
        raise ValueError(f"home={home}: allowed are torch.float16, torch.bfloat16 and None")
    return home


def check_logical(dtype: object) -> None:
    """Raise unless values can have this dtype."""
    if dtype not in LOGICALS:
        raise ValueError(f"dtype={dtype}: a logical dtype is one of {', '.join(map(str, LOGICALS))}")


def common_storage(storages: Iterable[torch.dtype]) -> torch.dtype:
    """Return the payload type of a result: the wider one, or of two types of one width the next wider one."""
    found = set(storages)
    width = max(_WIDTH[storage] for storage in found)
    widest = [storage for storage in found if _WIDTH[storage] == width]
    if len(widest) == 1:
        return widest[0]
    return torch.float16 if width == 0 else torch.float32


def smallest(storage: torch.dtype) -> float:
    """Return the smallest positive number of a payload type."""
    limits = torch.finfo(storage)
    return limits.smallest_normal * limits.eps
