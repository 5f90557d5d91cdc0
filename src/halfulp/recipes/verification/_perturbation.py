"""Perturbs every floating result of a run by about an ulp, to estimate float32's error where float64 does not run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

# Results are multiplied by 1, or by 1 more or less this.
_PLACE = 2.0**-23
_LARGEST = 2.0**96


class Jitter(TorchDispatchMode):
    """Multiplies the results of operators by 1 - 2^-23, 1 or 1 + 2^-23, element by element at random.

    Rounding errors of another size and sign than a run's own show how far these go on their way, as in stochastic
    arithmetic (Vignes, "A stochastic arithmetic for reliable scientific computation", 1993). Whole numbers stay, and so
    does what shares memory with an operand or is written in place.
    """

    def __init__(self) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(0)

    def __torch_dispatch__(self, operator: Any, types: Any, arguments: tuple = (), options: dict | None = None) -> Any:
        options = options or {}
        results = operator(*arguments, **options)
        if operator.is_view or operator._schema.is_mutable:
            return results
        given = {_memory(x) for x in tree_leaves((arguments, options)) if isinstance(x, Tensor)}
        return tree_map(lambda x: self._moved(x, given), results)

    def _moved(self, x: Any, given: set[int]) -> Any:
        if type(x) is not Tensor or x.dtype != torch.float32 or _memory(x) in given:
            return x
        steps = torch.randint(-1, 2, x.shape, generator=self._generator, dtype=torch.float32, device="cpu")
        factor = 1 + _PLACE * steps.to(x.device)
        # Counts, indices and what stands for no value have no rounding errors.
        return torch.where((x == x.round()) | (x.abs() > _LARGEST), x, x * factor)


def _memory(x: Tensor) -> int:
    """The identity of a tensor's memory, the same for tensors that share it."""
    try:
        return x.untyped_storage()._cdata
    except (RuntimeError, NotImplementedError):  # of a tensor without memory of its own
        return 0
