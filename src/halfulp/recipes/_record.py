"""What every operator of a step gave, in order, so that two runs of it can be compared bit by bit."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..kernels import same_bits
from ..scaled import ScaledTensor


class Step(NamedTuple):
    """One operator's call: its name, the module and direction it ran in, its floating results, decoded."""

    operator: str
    place: str
    results: tuple[Tensor, ...]

    def kind(self) -> tuple:
        """What the same step of another run has in common with it."""
        return self.operator, self.place, tuple(tuple(x.shape) for x in self.results)


class Recorder(TorchDispatchMode):
    """Keeps every operator's results while a model runs; those that only look at or move a tensor are left out."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.steps: list[Step] = []
        self._places = ["the model"]
        self._handles = []
        for name, module in model.named_modules():
            path = name or "the model"
            self._handles.append(module.register_forward_pre_hook(lambda *_, path=path: self._places.append(path)))
            self._handles.append(module.register_forward_hook(lambda *_: self._leave(), always_call=True))

    def _leave(self) -> None:
        self._places.pop()

    def __torch_dispatch__(self, operator: Any, types: Any, arguments: tuple = (), options: dict | None = None) -> Any:
        results = operator(*arguments, **(options or {}))
        passed = operator.is_view or operator._schema.is_mutable or "empty" in operator.name()  # memory to be written
        if not passed and operator.namespace == "aten":
            floats = tuple(plain(x) for x in tree_leaves(results) if _is_float(x))
            if floats:
                backward = torch._C._current_graph_task_id() != -1
                place = "the backward pass" if backward else self._places[-1]
                self.steps.append(Step(str(operator), place, floats))
        return results

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for handle in self._handles:
            handle.remove()


def aligned(wanted: list[Step], got: list[Step]) -> Iterator[tuple[int, Step, Step]]:
    """The steps that two runs share, in order, with the place of the first among the wanted.

    Operators that only one run has (conversions at the door, rescaling) are passed over: the two are matched as two
    versions of a text, by operator, module and shapes.
    """
    ours, theirs = ([step.kind() for step in steps] for steps in (wanted, got))
    if ours == theirs:
        yield from zip(range(len(wanted)), wanted, got, strict=True)
        return
    matcher = difflib.SequenceMatcher(None, ours, theirs, autojunk=False)
    for left, right, count in matcher.get_matching_blocks():
        for offset in range(count):
            yield left + offset, wanted[left + offset], got[right + offset]


def first_difference(wanted: list[Step], got: list[Step]) -> tuple[str, str, float] | None:
    """The first operator whose results differ: its name, where it ran, the largest relative difference."""
    for _, ours, theirs in aligned(wanted, got):
        if not all(map(same_bits, ours.results, theirs.results)):
            return theirs.operator, theirs.place, max(map(relative, ours.results, theirs.results))
    return None


def relative(wanted: Tensor, got: Tensor) -> float:
    """The norm of the difference over the norm of what was wanted; infinite where infinities or NaN differ.

    >>> inf = float("inf")
    >>> relative(torch.tensor([4.0, inf]), torch.tensor([3.0, inf])), relative(torch.tensor(inf), torch.tensor(-inf))
    (0.25, inf)
    """
    wanted, got = wanted.double(), got.double()
    finite = wanted.isfinite() & got.isfinite()
    if not bool((finite | (wanted == got) | (wanted.isnan() & got.isnan())).all()):
        return float("inf")
    norm = torch.where(finite, wanted, 0.0).norm().clamp(min=torch.finfo(torch.float64).tiny)
    return float(torch.where(finite, wanted - got, 0.0).norm() / norm)


def _is_float(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def plain(x: Tensor) -> Tensor:
    """A copy of the values, decoded."""
    x = x.detach()
    return x.decode(torch.float32) if isinstance(x, ScaledTensor) else x.clone()
