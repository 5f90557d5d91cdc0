"""The step on tensors, one parameter at a time: slow, runs anywhere; the compiled step must give the same bits."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence

import torch

from ...kernels import IndexMap, Traced, record, run_on_tensors
from ...kernels._device_function import STREAM, record_call
from ...kernels._trace import Piece
from ...rounding._random_bits import stream_of
from ..parameters._step_spec import POINTERS_BEFORE_STATES, StepSpec
from ..rules._update_rule import UpdateRule
from ._kernel import record_step


def reference_step(
    spec: StepSpec,
    parts: Sequence[torch.Tensor],
    gradient: torch.Tensor,
    states: Sequence[list[torch.Tensor]],
    constants: Sequence[float],
    key: int | None,
    index_map: IndexMap,
) -> tuple[float, float, float, float] | None:
    """One step of one parameter, in place.

    Args:
        spec: the step specification.
        parts: the parameter and its auxiliary tensors.
        gradient: of the parameter's shape.
        states: the tensors of each state.
        constants: of the specification, rounded to float32 here.
        key: of the random words; None without draws.
        index_map: the parameter's place in the whole.

    Returns:
        For a metered specification: updates wanted, updates cancelled, sum u^2, sum u (realised change).
    """
    drawn = {}
    if key is not None:
        drawn = dict(zip(STREAM, stream_of(key, global_index(index_map, gradient.device))))
    found = _run(spec, parts, gradient, states, constants, drawn)
    return (found[0], found[1], found[2], found[3]) if spec.metered else None


def reference_amax(
    spec: StepSpec,
    parts: Sequence[torch.Tensor],
    gradient: torch.Tensor,
    states: Sequence[list[torch.Tensor]],
    constants: Sequence[float],
) -> list[float]:
    """The largest finite magnitudes of the weight and of each scaled state that a step would store; nothing changes."""
    return _run(spec, parts, gradient, states, constants, {})


def change_by_rule(
    rule: UpdateRule,
    weight: torch.Tensor,
    gradient: torch.Tensor,
    states: Iterable[torch.Tensor],
    constants: Sequence[float],
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return what a rule, in float32, makes of weights, gradients and states: the change, and the new states."""
    given = [weight.float(), gradient.float(), *states]
    rounded = torch.tensor([*constants], dtype=torch.float32, device="cpu").tolist()
    piece = _recorded_rule(rule.update, len(given) + len(rounded))
    change, *new = run_on_tensors(piece.trace, (), dict(enumerate([*given, *rounded])), piece.results)[0]
    return change, new


@functools.lru_cache(64)
def _recorded_rule(update: Callable, inputs: int) -> Piece:
    trace, results = record(functools.partial(record_call, update), torch.float32, inputs)
    as_values = [x if isinstance(x, Traced) else trace.emit("constant", (), float(x).hex(), "f32") for x in results]
    return Piece(trace, tuple(x.number for x in as_values))


def _run(spec, parts, gradient, states, constants, drawn) -> list[float]:
    arrays = {**dict(enumerate(parts)), POINTERS_BEFORE_STATES - 1: gradient}
    arrays |= dict(enumerate((tensor for state in states for tensor in state), POINTERS_BEFORE_STATES))
    rounded = torch.tensor(constants, dtype=torch.float32, device="cpu").tolist()
    inputs = {**drawn, **{("constant", k): value for k, value in enumerate(rounded)}}
    return run_on_tensors(record_step(spec), arrays, inputs, block=spec.block)[1]


def global_index(index_map: IndexMap, device: torch.device) -> torch.Tensor:
    """The global flat index of every element of a local tensor, in its shape."""
    index = torch.zeros((), dtype=torch.int64, device=device)
    whole = index_map.global_shape
    stride = 1
    for d in reversed(range(len(whole))):
        along = torch.arange(index_map.shape[d], dtype=torch.int64, device=device)
        along = along * index_map.step[d] + index_map.offset[d]
        index = index + (along * stride).reshape([-1 if k == d else 1 for k in range(len(whole))])
        stride *= whole[d]
    return index.reshape(index_map.shape)
