"""Statistics of a model's payloads: distance from 1, share within each format's window, saturated elements."""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..subclass import recorded
from ._rescale import root_mean_square
from ._scaled_tensor import ScaledTensor

FORMATS = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16)


@dataclass
class Row:
    """The payloads of one operator's results in one module and one pass.

    Attributes:
        side: "forward" or "backward".
        module: its qualified name, "" outside of the model's modules.
        operator: of torch.
        storage: the payloads' dtype.
        calls: how often it ran.
        lowest, highest: log2 of the payloads' root mean square over the calls, zeros and non-finite elements left out.
        elements: how many were finite and not zero.
        inside: of those, how many lie in each format's window, from its smallest normal to its largest number.
        saturated: how many have the largest magnitude that their storage has.
    """

    side: str
    module: str
    operator: str
    storage: str
    calls: int = 0
    lowest: float = math.inf
    highest: float = -math.inf
    elements: int = 0
    inside: dict[str, int] = field(default_factory=dict)
    saturated: int = 0

    def share(self, format: str) -> float:
        """Return the share of elements in a format's window; 1 if there are none."""
        return self.inside.get(format, 0) / self.elements if self.elements else 1.0

    def add(self, payload: Tensor) -> None:
        """Add one result."""
        self.calls += 1
        if not payload.numel():
            return
        value = root_mean_square(payload)
        if value > 0:
            exponent = value.log2().item()
            self.lowest, self.highest = min(self.lowest, exponent), max(self.highest, exponent)
        magnitudes = payload.to(torch.float32).abs()
        magnitudes = magnitudes[magnitudes.isfinite() & (magnitudes != 0)]
        self.elements += magnitudes.numel()
        self.saturated += int((magnitudes == torch.finfo(payload.dtype).max).sum())
        for dtype in FORMATS:
            limits = torch.finfo(dtype)
            inside = (magnitudes >= limits.smallest_normal) & (magnitudes <= limits.max)
            name = _name(dtype)
            self.inside[name] = self.inside.get(name, 0) + int(inside.sum())


@dataclass
class Drift:
    """The result of `drift`: rows in the order of their first call, and the fallbacks of the block."""

    rows: list[Row] = field(default_factory=list)
    fallbacks: Counter[str] = field(default_factory=Counter)

    def worst(self, side: str) -> Row | None:
        """Return the row of a pass whose payloads are farthest from 1."""
        rows = [row for row in self.rows if row.side == side and row.elements]
        return max(rows, key=lambda row: max(-row.lowest, row.highest), default=None)

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers and names, for JSON."""
        rows = [
            vars(row)
            | {"lowest": row.lowest if row.elements else None, "highest": row.highest if row.elements else None}
            | {"inside": {name: row.share(name) for name in row.inside}}
            for row in self.rows
        ]
        return {"rows": rows, "fallbacks": dict(self.fallbacks)}

    def __str__(self) -> str:
        names = [_name(dtype) for dtype in FORMATS]
        head = ["side", "module", "operator", "payload", "calls", "log2 rms", *names, "saturated"]
        lines = [head, *(_cells(row, names) for row in self.rows)]
        widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
        texts = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines]
        return "\n".join([*texts, *(f"fallback: {name}, {count} times" for name, count in self.fallbacks.items())])


def _cells(row: Row, names: list[str]) -> list[str]:
    low, high = f"{row.lowest:.1f}", f"{row.highest:.1f}"
    span = "" if not row.elements else low if low == high else f"{low} to {high}"
    shares = [f"{100 * row.share(name):.1f}%" if row.elements else "" for name in names]
    return [row.side, row.module, row.operator, row.storage, str(row.calls), span, *shares, str(row.saturated)]


@contextmanager
def drift(model: nn.Module) -> Iterator[Drift]:
    """Measure, within a block, the payloads of every operator's results, forward and backward.

    Args:
        model: its modules give the rows their names. Compiled models are measured as if they were not.

    Yields:
        A Drift, complete as the block ends: print it, or take `to_dict()`.

    Raises:
        ValueError: as the block ends, where nothing in it was scaled and the model has no scaled parameters.

    >>> from halfulp.scaled import scalify
    >>> model = scalify(torch.nn.Linear(8, 4))
    >>> with drift(model) as report:
    ...     model(torch.randn(2, 8)).sum().backward()
    >>> sorted({row.side for row in report.rows}), report.to_dict()["fallbacks"]
    (['backward', 'forward'], {})
    """
    report = Drift()
    spans = _Spans()
    with ExitStack() as stack:
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(spans.attached(model))
        counts = stack.enter_context(recorded())
        stack.enter_context(_Meter(report, spans))
        yield report
    report.fallbacks = Counter(counts)
    if not report.rows and not any(isinstance(p, ScaledTensor) for p in model.parameters()):
        raise ValueError(f"this {type(model).__name__} has no scaled parameters: hu.scalify(model)")


class _Spans:
    """The module of each node of the backward graph: nodes are numbered in creation order."""

    def __init__(self) -> None:
        self.open: list[str] = []
        self.starts: list[int] = []
        self.names: list[str] = []

    @property
    def current(self) -> str:
        return self.open[-1] if self.open else ""

    def of_node(self, node: Any) -> str:
        """Return the module whose forward pass created a node."""
        i = bisect.bisect_right(self.starts, node._sequence_nr()) - 1
        # Nodes that accumulate gradients have the largest sequence number of all.
        return "" if i < 0 or node._sequence_nr() >= 2**63 else self.names[i]

    def _mark(self) -> None:
        self.starts.append(torch.autograd._get_sequence_nr())
        self.names.append(self.current)

    @contextmanager
    def attached(self, model: nn.Module) -> Iterator[None]:
        """Hook the model's modules for the duration of the block."""
        handles = []
        for name, module in model.named_modules():
            handles.append(module.register_forward_pre_hook(self._enter(name), prepend=True))
            handles.append(module.register_forward_hook(self._leave, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, name: str) -> Any:
        def enter(module: nn.Module, arguments: Any) -> None:
            self.open.append(name)
            self._mark()

        return enter

    def _leave(self, module: nn.Module, arguments: Any, output: Any) -> None:
        if self.open:
            self.open.pop()
        self._mark()


class _Meter(TorchDispatchMode):
    """A dispatch mode that measures every operator's results."""

    def __init__(self, report: Drift, spans: _Spans) -> None:
        TorchDispatchMode.__init__(self)
        self._report, self._spans = report, spans
        self._rows: dict[tuple[Any, ...], Row] = {}

    def __torch_dispatch__(
        self, operator: Any, types: Any, arguments: tuple[Any, ...] = (), options: dict[str, Any] | None = None
    ) -> Any:
        results = operator(*arguments, **(options or {}))
        if not operator.is_view:
            for x in tree_leaves(results):
                if isinstance(x, ScaledTensor):
                    self._add(operator, x)
        return results

    def _add(self, operator: Any, x: ScaledTensor) -> None:
        node = torch._C._current_autograd_node()
        side = "forward" if node is None else "backward"
        module = self._spans.current if node is None else self._spans.of_node(node)
        name = operator._schema.name.removeprefix("aten::")
        key = (side, module, name, _name(x._payload.dtype))
        if key not in self._rows:
            self._rows[key] = Row(*key)
            self._report.rows.append(self._rows[key])
        self._rows[key].add(x._payload)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
