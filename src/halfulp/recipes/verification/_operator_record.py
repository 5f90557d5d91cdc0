"""Compares every operator of a scaled run with torch's own on the same values, to name a wrong one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from ...kernels import same_bits
from ...scaled import ScaledTensor
from ._agreement import agrees, relative


class Difference(NamedTuple):
    """An operator whose results are not torch's: its name, the module or direction it ran in, and by how much."""

    operator: str
    place: str
    off: float


class OperatorCheck(TorchDispatchMode):
    """Runs torch's operator on the decoded operands beside each operator of scaled tensors.

    Since both have the same operands, what a wrong operator does to those behind it is not held against them, and the
    order in which a backward pass runs does not matter. Views compute nothing and are passed over.

    Attributes:
        unequal: the first operator whose bits differ, if any.
        wrong: those that differ by more than another order of sums explains, in order.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.unequal: Difference | None = None
        self.wrong: list[Difference] = []
        self._module_paths = ["the model"]
        self._handles = []
        for name, module in model.named_modules():
            path = name or "the model"
            self._handles.append(
                module.register_forward_pre_hook(lambda *_, path=path: self._module_paths.append(path))
            )
            self._handles.append(module.register_forward_hook(lambda *_: self._leave(), always_call=True))

    def _leave(self) -> None:
        self._module_paths.pop()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for handle in self._handles:
            handle.remove()

    def __torch_dispatch__(self, operator: Any, types: Any, arguments: tuple = (), options: dict | None = None) -> Any:
        options = options or {}
        given = tree_leaves((arguments, options))
        scaled = any(isinstance(x, ScaledTensor) for x in given)
        if not scaled or operator.is_view or operator.namespace != "aten" or "empty" in operator.name():
            return operator(*arguments, **options)
        # Decoded before the call, which may write into its operands.
        operands = [tree_map(lambda x, to=to: _decoded(x, to), (arguments, options)) for to in _WIDTHS]
        with _same_draws(options.get("generator")) as again:
            results = operator(*arguments, **options)
            wanted = _plainly(operator, operands[0], again)
            got = _floats(results)
            if len(got) == len(wanted):
                wanted, got = list(map(_within, wanted, got)), list(map(_within, got, wanted))
            if len(got) != len(wanted) or not all(map(same_bits, wanted, got)):
                exact = _plainly(operator, operands[1], again)
                self._differs(operator, wanted, got, exact)
        return results

    def _differs(self, operator: Any, wanted: list[Tensor], got: list[Tensor], exact: list[Tensor]) -> None:
        if len(wanted) != len(got) or any(a.shape != b.shape for a, b in zip(wanted, got, strict=True)):
            return  # torch takes no such operands; the results count by what they lead to
        place = "the backward pass" if torch._C._current_graph_task_id() != -1 else self._module_paths[-1]
        found = Difference(str(operator), place, max(map(relative, wanted, got)))
        self.unequal = self.unequal or found
        best: list[Tensor | None] = [None] * len(wanted)
        if len(exact) == len(wanted):
            best[:] = map(_within, exact, wanted)
        if not all(map(agrees, wanted, got, best)):
            self.wrong.append(found)


_WIDTHS = (torch.float32, torch.float64)


# A payload that stands for more may saturate under another scale, or overflow; models take such numbers for "no value".
_LARGEST = 2.0**96


def _within(x: Tensor, other: Tensor) -> Tensor:
    """The tensor, clamped where the other is beyond the bound too, as there any such number will do."""
    if x.shape != other.shape:
        return x
    return torch.where((x.abs() >= _LARGEST) & (other.abs() >= _LARGEST), x.clamp(-_LARGEST, _LARGEST), x)


def _decoded(x: Any, dtype: torch.dtype) -> Any:
    """A copy of the values in another dtype, with the strides of the tensor."""
    if not isinstance(x, Tensor):
        return x
    values = x.detach()
    values = values.decode(torch.float32) if isinstance(values, ScaledTensor) else values.clone()
    return values.to(dtype) if values.dtype == torch.float32 else values


def _plainly(operator: Any, operands: tuple, again: Any) -> list[Tensor]:
    """The floating results of torch's own operator; none where it does not take these operands."""
    arguments, options = operands
    again()
    try:
        return _floats(operator(*arguments, **options))
    except (RuntimeError, TypeError, NotImplementedError):
        return []


def _floats(results: Any) -> list[Tensor]:
    return [_decoded(x, torch.float32) for x in tree_leaves(results) if isinstance(x, Tensor) and x.is_floating_point()]


@contextlib.contextmanager
def _same_draws(generator: torch.Generator | None) -> Iterator[Any]:
    """A block that yields a function to rewind the generators; at its end they are where the first call left them."""
    source = torch.random.default_generator if generator is None else generator
    before = source.get_state()
    after: list[Tensor] = []

    def again() -> None:
        after.append(source.get_state())
        source.set_state(before)

    yield again
    if after:
        source.set_state(after[0])
