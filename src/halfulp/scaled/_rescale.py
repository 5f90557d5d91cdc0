"""Rescaling of payloads, where in a model it is placed, and the statistics that show where it is missing."""

from __future__ import annotations

import bisect
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..kernels import define_operator, is_under_transform, untraced
from ..subclass import recorded
from ..subclass.models._conversion import matcher, remove_hooks
from . import _fused as fused
from . import _powers_of_two as _powers
from ._operands import make_scaled
from ._payloads import to_float32
from ._registry import implements
from ._scaled_tensor import ScaledTensor, wrap

Statistic = Literal["rms", "max", "mean"]
Side = Literal["forward", "gradient", "both"]
STATISTICS = ("rms", "max", "mean")
SIDES = ("forward", "gradient", "both")
# Types whose payloads have squares and sums within float32's range.
_SHORT = (torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)


def rescale(x: Tensor, by: Statistic = "rms", side: Side = "forward") -> Tensor:
    """Return the values under a scale that brings the payload to a magnitude of about 1.

    The same values but for the smallest: what falls below the storage's smallest normal number under the new scale
    loses digits there, down to 0. With a float32 payload or within half of the storage's binades none does.

    payload / 2^k and scale * 2^k, with 2^k next to the root mean square, the largest or the mean magnitude of the
    payload's finite non-zero elements. Payloads that would leave the storage's range get a larger scale, and zeros keep
    theirs. The dynamic rescaling of "Scalify" (Balança et al., arXiv 2407.17353, section 3.3); it acts the same with
    and without autograd, eager and compiled. Plain tensors have no scale and come back as they are.

    Args:
        x: a tensor of any shape.
        by: the statistic, "rms", "max" or "mean".
        side: "forward" rescales x, "gradient" the gradient that flows back through it, "both" both.

    Returns:
        A tensor of x's shape, storage and dtype.

    Raises:
        TypeError: x is no tensor.
        ValueError: another statistic or side.

    >>> from halfulp.scaled import ScaledTensor
    >>> rescale(ScaledTensor(torch.tensor([1e-4, 3e-4]), 1.0))
    ScaledTensor([1.0000e-04, 3.0000e-04], scale=2^-12, payload=torch.float32)
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"x is a torch.Tensor, got {type(x).__name__}")
    if by not in STATISTICS:
        raise ValueError(f"by={by!r}: allowed are {', '.join(STATISTICS)}")
    check_side(side)
    chosen: type[torch.autograd.Function] = _Transformed if is_under_transform() else _Rescale
    apply: Callable[..., Tensor] = chosen.apply
    return apply(x, by, side) if isinstance(x, ScaledTensor) else x


def check_side(side: object) -> None:
    """Raise unless `side` is a side on which to rescale."""
    if side not in SIDES:
        raise ValueError(f"side={side!r}: allowed are {', '.join(SIDES)}")


def rescaled(x: ScaledTensor, by: Statistic = "rms") -> ScaledTensor:
    """Return the values under the scale that brings the payload's statistic next to 1."""
    if not x.numel():
        return x.clone()
    if by == "rms" and fused.engaged(x._payload):
        power = fused.level(x._payload, x._payload.dtype, 1.0)
        return wrap(*fused.finish(x._payload, (x._scale, power), x._payload.dtype, "levelled"), x.dtype)
    power = power_of_payload(x._payload, by)
    scale, rest = _powers.product(x._scale, power)
    return make_scaled(_powers.times(to_float32(x) / power, rest), scale, x._payload.dtype, x.dtype)


def power_of_payload(payload: Tensor, by: Statistic) -> Tensor:
    """Return the power of two next to a statistic of the finite non-zero elements, or what the largest needs."""
    amax, value = _statistic(payload, by)
    lowest = amax / torch.finfo(payload.dtype).max
    power = torch.maximum(_powers.round_to_power(value, "nearest"), _powers.round_to_power(lowest, "up"))
    return torch.where(amax == 0, torch.ones_like(power), power)


def root_mean_square(payload: Tensor) -> Tensor:
    """Return the root mean square of the finite non-zero elements; 0 if there is none."""
    return _statistic(payload, "rms")[1]


def _statistic(payload: Tensor, by: Statistic) -> tuple[Tensor, Tensor]:
    """Return the largest magnitude and a statistic of the finite non-zero elements."""
    wide = payload.detach().to(torch.float32 if payload.dtype in _SHORT else torch.float64)
    magnitudes = torch.nan_to_num(wide, 0.0, 0.0, 0.0).abs()
    amax = magnitudes.amax()
    if by == "max":
        return amax, amax
    count = magnitudes.count_nonzero().clamp(min=1)
    if by == "mean":
        return amax, magnitudes.sum() / count
    return amax, (magnitudes.square().sum() / count).sqrt()


# An operator, so that compilers see one node and do not trace into payloads.
_change = define_operator(
    "rescale_payload(Tensor x, str by) -> Tensor", lambda x, by: x.clone(), lambda x, by: torch.empty_like(x)
)
implements(_change, family="rescaling")(rescaled)
# The identity on values, in second derivatives too.
torch.library.register_autograd("halfulp::rescale_payload", lambda context, gradient: (gradient, None))


class _Rescale(torch.autograd.Function):
    """The identity on values, which rescales the result, its gradient, or both."""

    @staticmethod
    def forward(context: Any, x: Tensor, by: Statistic, side: Side) -> Tensor:
        context.by, context.side = by, side
        return x.view_as(x) if side == "gradient" else _change(x, by)

    @staticmethod
    @untraced
    def backward(context: Any, gradient: Tensor) -> tuple[Any, ...]:
        return gradient if context.side == "forward" else _change(gradient, context.by), None, None


class _Transformed(_Rescale):
    """The same in forward mode. Dynamo refuses Functions with a jvp, so that it is chosen only where one is needed."""

    @staticmethod
    def jvp(context: Any, tangent: Tensor, *_: object) -> Tensor:
        return tangent.view_as(tangent) if context.side == "gradient" else _change(tangent, context.by)


Rescale = Literal["auto", "norms"] | Iterable[str] | Mapping[str, Side] | None

_SIDE = "_halfulp_rescale"
_NORM = re.compile("Norm(?![a-z])")


def sides_of(model: nn.Module, rescale: Rescale) -> dict[nn.Module, Side]:
    """Return which modules rescale their first scaled input, and on which side.

    Raises:
        ValueError: a name that matches no module, or another side.
    """
    named = dict(model.named_modules())
    if rescale is None:
        return {}
    if rescale == "norms":
        return {module: "gradient" for module in named.values() if _is_norm(module)}
    if isinstance(rescale, str):
        allowed = "'auto', 'norms', None, names of modules, and {name: side}"
        raise ValueError(f"rescale={rescale!r}: allowed are {allowed}")
    at_inputs: Side = "gradient"
    wanted = rescale if isinstance(rescale, Mapping) else dict.fromkeys(rescale, at_inputs)
    sides: dict[nn.Module, Side] = {}
    for glob, side in wanted.items():
        check_side(side)
        matches = matcher([glob], list(named), what="rescale", of="module")
        for name, module in named.items():
            if matches(module, name):
                sides[module] = side if sides.get(module, side) == side else "both"
    return sides


def _is_norm(module: nn.Module) -> bool:
    """Return whether a module is a normalisation, by its class's name; modules that hold others are none."""
    return bool(_NORM.search(type(module).__name__)) and not module._modules


def install(sides: Mapping[nn.Module, Side]) -> None:
    """Rescale at these modules from now on."""
    for module, side in sides.items():
        if _SIDE not in module.__dict__:
            module.register_forward_pre_hook(_rescale_input, with_kwargs=True)
        module.__dict__[_SIDE] = side


def remove(model: nn.Module) -> None:
    """Remove every rescale from a model."""
    for module in model.modules():
        module.__dict__.pop(_SIDE, None)
    remove_hooks(model.modules(), lambda hook: hook is _rescale_input)


def placed(model: nn.Module) -> dict[str, Side]:
    """Return the names of the modules that rescale, and on which side."""
    return {name: module.__dict__[_SIDE] for name, module in model.named_modules() if _SIDE in module.__dict__}


def propose_rescales(
    model: nn.Module, batch: Any, loss: Callable[[Any], Tensor], window: float = 4.0
) -> dict[str, Side]:
    """Return the fewest modules at whose inputs to rescale, from one step in which nothing is rescaled.

    The step measures log2 of the payloads' root mean square at every module's input, forward and backward. In the order
    of either pass, a rescale is placed at the first module whose payloads left the window since the last one: the
    fewest for a chain of modules. The model, its gradients, buffers and the random state are as they were.

    Args:
        model: one that `scalify` changed.
        batch: a tuple is given to the model as arguments, a dict by name, anything else as its only argument.
        loss: a function of the model's output that returns a scalar.
        window: how many powers of two above or below 1 payloads may stray.

    Returns:
        Names of modules and sides, for `scalify(model, rescale=...)`.

    Raises:
        ValueError: the model has no scaled parameters.

    >>> from halfulp.scaled import scalify
    >>> model = scalify(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2)), rescale=None)
    >>> propose_rescales(model, torch.ones(4, 8), lambda out: out.square().mean())
    {}
    """
    parameters = [p for p in model.parameters() if isinstance(p, ScaledTensor) and p.requires_grad]
    if not parameters:
        raise ValueError(f"this {type(model).__name__} has no scaled parameters: hu.scalify(model)")
    probe = _Probe()
    with _without_rescales(model), probe.attached(model), torch.enable_grad():
        value = loss(call(model, batch))
        torch.autograd.grad(value, parameters, allow_unused=True)
    forward = _first_to_leave(probe.forward, window)
    backward = _first_to_leave(probe.backward, window)
    order = [name for name, _ in (*probe.forward, *probe.backward)]
    both: dict[str, Side] = {name: "both" for name in order if name in forward and name in backward}
    one: dict[str, Side] = {
        name: "forward" if name in forward else "gradient" for name in order if name in forward or name in backward
    }
    return one | both


def call(model: nn.Module, batch: Any) -> Any:
    """Return a model's output for a batch: a tuple holds positional arguments, a dict named ones."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple) else model(batch)


def _first_to_leave(measured: list[tuple[str, float]], window: float) -> set[str]:
    """Return where to rescale so that every payload is within the window after its last rescale."""
    chosen: set[str] = set()
    start = 0.0
    for name, value in measured:
        if name in chosen or abs(value - start) > window:
            chosen.add(name)
            start = value
    return chosen


def _replace_tensors(
    arguments: tuple[Any, ...], options: dict[str, Any], change: Callable[[ScaledTensor], Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return arguments with the first scaled one changed; None if there is none."""
    given: dict[int | str, Any] = dict(enumerate(arguments)) | options
    place = next((place for place, value in given.items() if isinstance(value, ScaledTensor)), None)
    if place is None:
        return None
    given[place] = change(given[place])
    return tuple(given[i] for i in range(len(arguments))), {name: given[name] for name in options}


@untraced
def _rescale_input(
    module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Rescale a module's first scaled input: a forward pre-hook."""
    side = module.__dict__.get(_SIDE)
    return None if side is None else _replace_tensors(arguments, options, lambda x: rescale(x, "rms", side))


class _Probe:
    """Measurements of payloads at the inputs of modules, in both passes."""

    def __init__(self) -> None:
        self.forward: list[tuple[str, float]] = []
        self.backward: list[tuple[str, float]] = []

    def attached(self, model: nn.Module) -> ExitStack:
        """Measure the model's modules until the block ends."""
        hooks = ExitStack()
        for name, module in model.named_modules():
            if name:
                hooks.enter_context(module.register_forward_pre_hook(self._hook(name), with_kwargs=True))
        return hooks

    def _hook(self, name: str) -> Callable[..., Any]:
        def measure(x: ScaledTensor) -> Tensor:
            _note(self.forward, name, x)
            seen = x.view_as(x)
            if seen.requires_grad:
                seen.register_hook(lambda gradient: _note(self.backward, name, gradient))
            return seen

        return lambda module, arguments, options: _replace_tensors(arguments, options, measure)


def _note(measured: list[tuple[str, float]], name: str, x: Tensor) -> None:
    if isinstance(x, ScaledTensor) and x.numel():
        value = root_mean_square(x._payload)
        if value > 0:
            measured.append((name, value.log2().item()))


@contextmanager
def _without_rescales(model: nn.Module) -> Iterator[None]:
    """Turn rescales off in the block, and restore buffers and the random state after it."""
    sides = {module: module.__dict__.pop(_SIDE) for module in model.modules() if _SIDE in module.__dict__}
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        with torch.random.fork_rng():
            yield
    finally:
        for module, side in sides.items():
            module.__dict__[_SIDE] = side
        with torch.no_grad():
            for buffer, start in buffers:
                buffer.copy_(start)


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

    def attached(self, model: nn.Module) -> ExitStack:
        """Hook the model's modules until the block ends."""
        hooks = ExitStack()
        for name, module in model.named_modules():
            hooks.enter_context(module.register_forward_pre_hook(self._enter(name), prepend=True))
            hooks.enter_context(module.register_forward_hook(self._leave, always_call=True))
        return hooks

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
