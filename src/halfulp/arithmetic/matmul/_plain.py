"""Products of plain matrices in all bits of their type, also where torch may take fewer."""

from __future__ import annotations

import torch

from ..._torch_versions import has_whole_products


def multiply(x: torch.Tensor, y: torch.Tensor, out: torch.Tensor) -> None:
    """x @ y into `out`: matrices or stacks of as many, float32 or float64.

    `torch.set_float32_matmul_precision` and `torch.backends` may let torch multiply float32 matrices in TensorFloat32
    or bfloat16. Then this one takes float64, and rounds.
    """
    function = torch.mm if x.dim() == 2 else torch.bmm
    if x.dtype == torch.float32 and not has_whole_products(x.device.type):
        out.copy_(function(x.double(), y.double()))
    else:
        function(x, y, out=out)
