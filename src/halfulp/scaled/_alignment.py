"""Rules of operators that need their operands under one scale: sums, choices, comparisons, joins."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._families import aligned
from ._form import made
from ._registry import implements

aten = torch.ops.aten


@implements(aten.add.Tensor, aten.add.Scalar, family="alignment")
def add(a: Any, b: Any, alpha: Any = 1) -> Tensor:
    """a + alpha b under the larger scale."""
    b = b if alpha == 1 else b * alpha
    (x, y), scale, storage, dtype = aligned(a, b)
    return made(x + y, scale, storage, dtype)


@implements(aten.sub.Tensor, aten.sub.Scalar, family="alignment")
def sub(a: Any, b: Any, alpha: Any = 1) -> Tensor:
    """a - alpha b under the larger scale."""
    b = b if alpha == 1 else b * alpha
    (x, y), scale, storage, dtype = aligned(a, b)
    return made(x - y, scale, storage, dtype)
