"""torch's fused optimizer steps, which are refused: their kernels read memory as plain numbers."""

from __future__ import annotations

from typing import Any, NoReturn

from ...kernels import torch_operators
from .._mctensor import implements

aten = torch_operators("aten")


def _refuse_fused_step(*arguments: Any, **options: Any) -> NoReturn:
    raise NotImplementedError(
        "this fused step reads memory as plain numbers, and MCTensors are sums of components: make the optimizer with "
        "fused=False"
    )


for _packet in (aten._fused_adam_, aten._fused_adamw_, aten._fused_sgd_, aten._fused_adagrad_):
    implements(_packet.default, _packet.tensor_lr)(_refuse_fused_step)
