"""Stores of 8 bits: e4m3fn and e5m2, as payloads of scaled tensors."""

from __future__ import annotations

import torch

from ...kernels.scalar._operations import load8, store8
from ...rounding._float8 import E4M3FN
from ...rounding._float8 import E5M2 as E5M2_CODEC
from ._storage import STORES, Store

E4M3 = Store("e4m3fn", torch.float8_e4m3fn, load8, store8, *E4M3FN, 32, 3, -6)
E5M2 = Store("e5m2", torch.float8_e5m2, load8, store8, *E5M2_CODEC, 32, 2, -14)
# What payloads of scaled tensors are stored in.
PAYLOADS = {**STORES, E4M3.dtype: E4M3, E5M2.dtype: E5M2}
