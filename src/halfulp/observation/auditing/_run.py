"""audit: compare two checkpoints of a run, their optimizer states, and what became of the last update."""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from ... import formats
from ..._messages import name_type, quote
from ...kernels import keeping_subnormals
from ...kernels._plain_memory import has_strided_values
from ...rounding import quantize
from .._record import RealisedChanges
from .._text import get_significand_bits
from ..checkpoints._checkpoint import (
    Checkpoint,
    NamedParameterState,
    name_optimizer_states,
    open_checkpoint,
    parse_checkpoint_content,
)
from ..findings import collect_findings
from ._audit import Audit, ParameterStateAudit
from ._tensors import (
    compare_tensors,
    count_equal_elements,
    split_tensors_into_chunks,
)

# What optimizers of halfulp, optimi and torchao keep beside a weight of few bits.
_COMPENSATION_STATE_NAMES = (
    "residual",
    "low_bits",
    "master",
    "kahan_comp",
    "kahan_compensation",
    "master_param",
    "shift",
)
_FIRST_MOMENT_STATE_NAMES = ("exp_avg", "momentum_buffer")
_SECOND_MOMENT_STATE_NAMES = ("exp_avg_sq", "max_exp_avg_sq", "square_avg")
_COPIED_OPTION_NAMES = ("lr", "weight_decay", "betas", "eps", "momentum", "amsgrad", "maximize")


def compare_optimizer_states(
    a: Mapping[str, NamedParameterState], b: Mapping[str, NamedParameterState], weights: Checkpoint, lr: float | None
) -> dict[str, ParameterStateAudit]:
    """Compare the optimizer states of two checkpoints, by parameter."""
    found, missing = {}, []
    for name, after in b.items():
        if name not in weights.tensors or not after.state:
            continue
        weight = weights.tensors[name]
        state = found[name] = _compare_parameter_states(name, a.get(name), after, weight, lr)
        is_rounded = not state.compensated and state.weight_update in (None, "nearest")
        is_number = get_significand_bits(weight.dtype) is not None and weight.numel() > 0
        if state.update is None and is_rounded and is_number and _get_state_tensors(after):
            missing.append(name)
    if missing:
        weights.unseen.append(
            f"the last updates of {quote(missing)} were not computed again: that takes states of Adam, Lion or SGD "
            "that are no codes of 8 bits, their step, and a learning rate above 0 (give lr=)"
        )
    return found


def _compare_parameter_states(
    name: str, before: NamedParameterState | None, after: NamedParameterState, weight: Tensor, lr: float | None
) -> ParameterStateAudit:
    found = {key: after.options[key] for key in _COPIED_OPTION_NAMES if after.options.get(key) is not None}
    options = {key: x.item() if isinstance(x, Tensor) and x.numel() == 1 else x for key, x in found.items()}
    if lr is not None:
        options["lr"] = lr
    ours = {} if before is None else _get_state_tensors(before)
    theirs = _get_state_tensors(after)
    steps = None if before is None else _read_step(before), _read_step(after)
    compensation = [key for key in _COMPENSATION_STATE_NAMES if key in theirs]
    weight_update = _find_weight_update_name(after.options, theirs)
    to_nearest = not compensation and weight_update in (None, "nearest")
    numbers = weight.dtype.is_floating_point and get_significand_bits(weight.dtype) is not None
    alike = {key: stored.dtype for key, stored in theirs.items() if stored.shape == weight.shape}
    first = [theirs[key] for key in _FIRST_MOMENT_STATE_NAMES if key in theirs]
    second = [theirs[key] for key in _SECOND_MOMENT_STATE_NAMES if key in theirs]
    return ParameterStateAudit(
        name,
        options,
        steps,
        {key: (ours[key].dtype if key in ours else None, dtype) for key, dtype in alike.items()},
        weight_update,
        bool(compensation),
        any(x not in ours or count_equal_elements(ours[x], theirs[x]) < theirs[x].numel() for x in compensation),
        all(moment.shape == weight.shape for moment in (*first, *second)),
        any(not int(moment.count_nonzero()) for moment in first),
        replay_last_update_rounded(weight, theirs, options, steps[1]) if to_nearest and numbers else None,
    )


def _get_state_tensors(state: NamedParameterState) -> dict[str, Tensor]:
    """Return the tensors of a state but for its step and checksums."""
    tensors = {key: one for key, one in state.state.items() if isinstance(one, Tensor)}
    return {key: one for key, one in tensors.items() if key != "step" and "checksum" not in key}


def _read_step(state: NamedParameterState) -> int | None:
    step = state.state.get("step")
    step = step.item() if isinstance(step, Tensor) and step.numel() == 1 else step
    return int(step) if isinstance(step, int | float) and math.isfinite(step) else None


def _find_weight_update_name(group: Mapping[str, Any], states: Mapping[str, Tensor]) -> str | None:
    """Return the name of a weight update of halfulp's optimizers; None of others."""
    if "weight_update" not in group:
        return None
    given = group["weight_update"]
    if given is None:
        return "split8" if "low_bits" in states else "nearest"
    return str(given.get("name")) if isinstance(given, Mapping) else str(given)


def replay_last_update_rounded(
    weight: Tensor, states: Mapping[str, Tensor], options: Mapping[str, Any], step: int | None
) -> RealisedChanges | None:
    """Return what nearest rounding left of the last update; None where the names of its states tell no known rule."""
    rule = _find_states_and_update_function(states, options, step)
    if rule is None or weight.numel() == 0:
        return None
    stored, compute_update = rule
    if any(moment.shape != weight.shape or not moment.dtype.is_floating_point for moment in stored):
        return None
    seen, lost, squares, products = 0, 0, 0.0, 0.0
    for parts in split_tensors_into_chunks(weight, *stored):
        w, *moments = (part.double() for part in parts)
        u = -compute_update(*moments) if options.get("maximize") else compute_update(*moments)
        known = w.isfinite() & u.isfinite() & (u != 0)
        w, u = w[known], u[known]
        if not len(w):
            continue
        # The weight is that after the step: an update that was lost left it as it was.
        rounded = quantize(w - u, formats.get(weight.dtype))
        largest = float(u.abs().max())
        scaled, moved = u / largest, (w - rounded) / largest
        seen += len(w)
        lost += int((rounded == w).sum())
        squares += float(scaled.square().sum()) * min(largest, 1e150) ** 2
        products += float((scaled * moved).sum()) * min(largest, 1e150) ** 2
    share = products / squares if squares else 1.0
    return RealisedChanges(seen, lost, seen, seen * (share if math.isfinite(share) else 1.0))


def _find_states_and_update_function(
    states: Mapping[str, Tensor], options: Mapping[str, Any], step: int | None
) -> tuple[list[Tensor], Callable[..., Tensor]] | None:
    """Return the states that an update is made of, and the function that makes it; None where they are not known.

    Adam (Kingma and Ba, arXiv 1412.6980, algorithm 1; AdamW, amsgrad): lr m' / (sqrt(v') + eps) with bias-corrected
    moments, which after step t are those that step t used. Lion: lr sign(m). SGD with momentum: lr times the buffer.
    """
    coded = (f"{name}_{part}" for name in ("exp_avg", "exp_avg_sq") for part in ("scale", "codes", "residual"))
    if not options.get("lr") or any(name in states for name in coded):
        return None
    lr, betas = float(options["lr"]), options.get("betas")
    pair = betas[:2] if isinstance(betas, list | tuple) and len(betas) >= 2 else None
    if pair is not None and {"exp_avg", "exp_avg_sq"} <= states.keys():
        second = "max_exp_avg_sq" if options.get("amsgrad") else "exp_avg_sq"
        if not step or second not in states:
            return None
        first, last, eps = 1 - float(pair[0]) ** step, 1 - float(pair[1]) ** step, float(options.get("eps", 0.0))
        return [states["exp_avg"], states[second]], lambda m, v: lr * (m / first) / ((v / last).sqrt() + eps)
    if pair is not None and "exp_avg" in states:
        return [states["exp_avg"]], lambda m: lr * m.sign()
    return ([states["momentum_buffer"]], lambda m: lr * m) if "momentum_buffer" in states else None


CheckpointOrPath = str | os.PathLike[str] | Mapping[str, Any]


@keeping_subnormals()
def audit(a: CheckpointOrPath, b: CheckpointOrPath, *, lr: float | None = None) -> Audit:
    """Compare two checkpoints of one run: what did not move, what rounding lost, what is NaN or of another dtype.

    Files are read by memory map, tensor by tensor; no model code is needed, and nothing that they hold is executed.
    Changes are in ulps: the spacing, at the element of A, of the coarser of the two dtypes. Where B holds an Adam's,
    Lion's or SGD's states, its last update is computed again, and rounded to the weight's dtype.

    Args:
        a, b: the earlier and the later checkpoint: a file of safetensors or torch.save, a sharded folder, a folder of
            HF's Trainer, or a state_dict, which refers to the weights themselves: copy.deepcopy one that training
            goes on from.
        lr: learning rate in place of the one that B's optimizer holds.

    Returns:
        An `Audit`: `print` it, or read `findings`, `tensors`, `states`, `to_dict()`.

    Raises:
        TypeError: a or b is neither a path nor a mapping.
        ValueError: it cannot be read as a checkpoint, or is refused by weights_only; both are the same file, the
            same memory, or of different models; lr is no number from 0 on.

    >>> import torch
    >>> start = {"norm.weight": torch.ones(64, dtype=torch.bfloat16), "head.weight": torch.ones(64)}
    >>> later = {"norm.weight": torch.ones(64, dtype=torch.bfloat16), "head.weight": torch.full((64,), 1.001)}
    >>> [(found.code, found.where) for found in audit(start, later).findings]
    [('weight-frozen', ('norm.weight',))]
    """
    known = isinstance(lr, int | float) and not isinstance(lr, bool)
    if lr is not None and not (known and 0 <= lr <= sys.float_info.max):
        raise ValueError(f"lr={lr!r}: give a number from 0 on")
    for given, which in ((a, "A"), (b, "B")):
        if not isinstance(given, str | os.PathLike | Mapping):
            raise TypeError(f"checkpoint {which} is {name_type(given)}: give a path or a state_dict")
    is_same = a is b
    if isinstance(a, str | os.PathLike) and isinstance(b, str | os.PathLike):
        with contextlib.suppress(OSError, ValueError):  # what is not there is said when it is opened
            is_same = Path(a).samefile(b)
    if is_same:
        same = name_type(a) if isinstance(a, Mapping) else a
        raise ValueError(f"A and B are the same checkpoint, {same}: give an earlier and a later one of a run")
    before, after = (
        parse_checkpoint_content(given, which) if isinstance(given, Mapping) else open_checkpoint(Path(given))
        for given, which in ((a, "A"), (b, "B"))
    )
    unseen = [*before.unseen, *after.unseen]
    if shared := _list_names_of_shared_memory(before.tensors, after.tensors):
        unseen.append(f"{quote(shared)} are the same memory in A and B, where no change can be seen")
    earlier, later = name_optimizer_states(before, unseen), name_optimizer_states(after, unseen)
    after.unseen.clear()
    complete = len(later) >= after.optimizer_parameter_count
    tensors = compare_tensors(before, after, set(earlier) | set(later))
    states = compare_optimizer_states(earlier, later, after, lr)
    unseen += [said for said in after.unseen if said not in unseen]
    said = tuple(dict.fromkeys(unseen))
    made = Audit(tensors, states, said, states_complete=complete)
    return replace(made, findings=collect_findings("audit", made))


def _list_names_of_shared_memory(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> list[str]:
    """Return the names under which two checkpoints hold one memory; refuse two that hold nothing else.

    Some tensors may rightly be the same objects in two dicts, as frozen weights and tables are.
    """
    shared = [name for name, x in a.items() if name in b and _locate_memory(x) == _locate_memory(b[name]) is not None]
    moving = [name for name, x in a.items() if x.numel() and (x.is_floating_point() or x.is_complex())]
    if shared and set(moving) <= set(shared):
        raise ValueError(
            f"A and B hold the same memory ({quote(shared)}): a state_dict refers to the weights themselves, so that "
            "both hold what they are now; take copy.deepcopy(model.state_dict()) before training goes on"
        )
    return shared


def _locate_memory(x: Tensor) -> tuple[Any, ...] | None:
    """Return where a tensor's elements lie; None of an empty one and of those without memory of their own."""
    has_memory = type(x) is Tensor and x.numel() and has_strided_values(x)
    return (x.device, x.data_ptr(), x.shape, x.stride()) if has_memory else None
