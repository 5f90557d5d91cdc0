"""The states of optimizers in two checkpoints side by side, and what became of the last update, computed again."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ... import formats
from ..._messages import listed
from ...formats import Format
from ...rounding import quantize
from .._record import RealisedChanges
from .._text import FLOAT32_PRECISION, get_precision
from ..checkpoints._files import Checkpoint, StoredTensor, split_tensors
from ..checkpoints._names import NamedParameterState
from ._audit import SECOND_MOMENTS, StateAudit
from ._tensors import ELEMENTS_AT_ONCE, count_same_elements

# What optimizers of halfulp, optimi and torchao keep beside a weight of few bits.
_COMPENSATION_STATES = ("residual", "low_bits", "master", "kahan_comp", "kahan_compensation", "master_param", "shift")
_FIRST_MOMENTS = ("exp_avg", "momentum_buffer")
_OPTION_NAMES = ("lr", "weight_decay", "betas", "eps", "momentum", "alpha", "amsgrad", "maximize", "fused", "nesterov")
_HALFULP_OPTION_NAMES = ("decoupled_weight_decay", "weight_update")


def compare_states(
    a: Mapping[str, NamedParameterState], b: Mapping[str, NamedParameterState], weights: Checkpoint, lr: float | None
) -> dict[str, StateAudit]:
    """Compare the optimizer states of two checkpoints, by parameter."""
    found, missing = {}, []
    for name, after in b.items():
        if name not in weights.tensors or not (after.tensors or after.values):
            continue
        weight = weights.tensors[name]
        state = found[name] = _compare_parameter_states(name, a.get(name), after, weight, lr)
        is_rounded = not state.compensated and state.weight_update in (None, "nearest")
        is_number = get_precision(weight.dtype) is not None and weight.numel > 0
        if state.update is None and is_rounded and is_number and state.dtypes and (state.shapes_match or state.coded):
            missing.append(name)
    if missing:
        weights.unseen.append(
            f"the last updates of {listed(missing)} were not computed again: that takes states of Adam, Lion or SGD "
            "that are no codes of 8 bits, their step, and a learning rate above 0 (give lr=)"
        )
    return found


def _compare_parameter_states(
    name: str, before: NamedParameterState | None, after: NamedParameterState, weight: StoredTensor, lr: float | None
) -> StateAudit:
    options = _read_options(after.options)
    # At the end of a schedule B's is 0.
    if lr is None and options.get("lr") == 0 and before is not None:
        lr = _read_options(before.options).get("lr")
    if lr is not None:
        options["lr"] = lr
    ours = {} if before is None else _get_state_tensors(before)
    theirs = _get_state_tensors(after)
    steps = None if before is None else _read_step(before), _read_step(after)
    compensation = [key for key in _COMPENSATION_STATES if key in theirs]
    moved = None
    if compensation and all(key in ours for key in compensation):
        moved = any(count_same_elements(ours[key], theirs[key]) < theirs[key].numel for key in compensation)
    weight_update = _name_weight_update(after.options, theirs)
    to_nearest = not compensation and weight_update in (None, "nearest")
    numbers = weight.dtype.is_floating_point and get_precision(weight.dtype) is not None
    replayed = replay_last_update(weight, theirs, options, steps[1]) if to_nearest and numbers else (None, {}, None)
    return StateAudit(
        name,
        {key: value for key, value in options.items() if key not in _HALFULP_OPTION_NAMES},
        steps,
        {key: (ours[key].dtype if key in ours else None, stored.dtype) for key, stored in theirs.items()},
        all(theirs[key].shape == weight.shape for key in (*_FIRST_MOMENTS, *SECOND_MOMENTS[:3]) if key in theirs),
        weight_update,
        bool(compensation),
        moved,
        any(_count_elements(theirs[key], lambda part: part != 0) == 0 for key in _FIRST_MOMENTS if key in theirs),
        {
            key: (_count_nonfinite(ours.get(key)), found)
            for key, one in theirs.items()
            if (found := _count_nonfinite(one))
        },
        *replayed,
        tuple(key for key, stored in theirs.items() if stored.shape != weight.shape),
        any(_is_coded_state(key, stored) for key, stored in theirs.items()),
    )


def _get_state_tensors(state: NamedParameterState) -> dict[str, StoredTensor]:
    """Return the tensors of a state but for its step and checksums."""
    return {key: one for key, one in state.tensors.items() if key != "step" and "checksum" not in key}


def _is_coded_state(key: str, stored: StoredTensor) -> bool:
    """Return whether a state means nothing without a scale or a table: of bitsandbytes, torchao, halfulp."""
    scale = key.endswith(("_scale", "_codes", "_residual", "_qmap")) or key.startswith(("absmax", "qmap"))
    return scale or (stored.dtype.itemsize == 1 and stored.dtype != torch.bool)


def _read_step(state: NamedParameterState) -> int | None:
    step = state.values.get("step")
    if "step" in state.tensors and state.tensors["step"].numel == 1:
        step = state.tensors["step"].read().item()
    return int(step) if isinstance(step, int | float) and math.isfinite(step) else None


def _read_options(group: Mapping[str, Any]) -> dict[str, Any]:
    found = {key: group[key] for key in (*_OPTION_NAMES, *_HALFULP_OPTION_NAMES) if group.get(key) is not None}
    return {
        key: value.item() if isinstance(value, Tensor) and value.numel() == 1 else value for key, value in found.items()
    }


def _name_weight_update(group: Mapping[str, Any], states: Mapping[str, StoredTensor]) -> str | None:
    """Return the name of a weight update of halfulp's optimizers; None of others."""
    if "weight_update" not in group:
        return None
    given = group["weight_update"]
    if given is None:
        return "split8" if "low_bits" in states else "nearest"
    return str(given.get("name")) if isinstance(given, Mapping) else str(given)


def _count_elements(stored: StoredTensor, is_counted: Callable[[Tensor], Tensor]) -> int:
    parts = split_tensors([stored], ELEMENTS_AT_ONCE)
    return sum(int(is_counted(part.float() if part.itemsize == 1 else part).sum()) for (part,) in parts)


def _count_nonfinite(stored: StoredTensor | None) -> int:
    if stored is None or not stored.dtype.is_floating_point:
        return 0
    return _count_elements(stored, lambda part: ~part.isfinite())


def replay_last_update(
    weight: StoredTensor, states: Mapping[str, StoredTensor], options: Mapping[str, Any], step: int | None
) -> tuple[RealisedChanges | None, Mapping[str, float], RealisedChanges | None]:
    """Return what nearest rounding left of the last update, which share others would lose, what was left of decay.

    The weight is that after the step: an update that was lost left it as it was. The update is None where the rule is
    not known from the names of its states, and the decay where the optimizer does not round it on its own.
    """
    rule = _find_update_rule(states, options, step)
    if rule is None or weight.numel == 0:
        return None, {}, None
    parts, compute_update = rule
    if any(part.shape != weight.shape or not part.dtype.is_floating_point for part in parts):
        return None, {}, None
    # torch's AdamW rounds the decay by itself, before the update.
    apart = options.get("decoupled_weight_decay") and not options.get("fused") and "weight_update" not in options
    rate = float(options["lr"]) * float(options.get("weight_decay") or 0) if apart and len(parts) == 2 else 0.0
    form = formats.get(weight.dtype)
    update, decay = _RoundedChanges(form), _RoundedChanges(form)
    for elements in split_tensors([weight, *parts], ELEMENTS_AT_ONCE // 8):
        w, *moments = (part.double() for part in elements)
        wanted = compute_update(*moments)
        update.add_changes(w, -wanted if options.get("maximize") else wanted)
        if rate:
            decay.add_changes(w, rate * w)
    return update.summarize_changes(), update.lost_by(), decay.summarize_changes() if rate else None


def _find_update_rule(
    states: Mapping[str, StoredTensor], options: Mapping[str, Any], step: int | None
) -> tuple[list[StoredTensor], Callable[..., Tensor]] | None:
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
        (beta1, beta2), eps = map(float, pair), float(options.get("eps", 0.0))

        def adam(m: Tensor, v: Tensor) -> Tensor:
            return lr * (m / (1 - beta1**step)) / ((v / (1 - beta2**step)).sqrt() + eps)

        return [states["exp_avg"], states[second]], adam
    if pair is not None and "exp_avg" in states:
        return [states["exp_avg"]], lambda m: lr * m.sign()
    return ([states["momentum_buffer"]], lambda m: lr * m) if "momentum_buffer" in states else None


class _RoundedChanges:
    """Sums of wanted changes, and counts of those that nearest rounding to a format loses."""

    def __init__(self, form: Format) -> None:
        self._form = form
        self._wanted, self._lost = 0, 0
        self._squares, self._products = 0.0, 0.0
        self._lost_by = {"split8": 0, "kahan": 0, "float32": 0} if form.precision < FLOAT32_PRECISION else {}

    def add_changes(self, w: Tensor, u: Tensor) -> None:
        known = w.isfinite() & u.isfinite() & (u != 0)
        w, u = w[known], u[known]
        if not len(w):
            return
        rounded = quantize(w - u, self._form)
        largest = float(u.abs().max())
        scaled, moved = u / largest, (w - rounded) / largest
        self._wanted += len(w)
        self._lost += int((rounded == w).sum())
        self._squares += float(scaled.square().sum()) * min(largest, 1e150) ** 2
        self._products += float((scaled * moved).sum()) * min(largest, 1e150) ** 2
        if self._lost_by:
            binade = torch.frexp(w)[1].clamp(min=self._form.emin + 1) - 1 - self._form.mantissa_bits
            halves = u.abs() / torch.exp2(binade.double() - 1)
            self._lost_by["split8"] += int((halves < 2.0**-8).sum())
            # A residual of few bits, which is mostly above an eighth of the weight's ulp, rounds too.
            self._lost_by["kahan"] += int((halves < 2.0 ** -(self._form.precision + 2)).sum())
            self._lost_by["float32"] += int((quantize(w - u, "fp32") == w).sum())

    def lost_by(self) -> dict[str, float]:
        """Return the share of the changes that each weight update would lose."""
        return {name: count / max(1, self._wanted) for name, count in self._lost_by.items()}

    def summarize_changes(self) -> RealisedChanges:
        """Return what nearest rounding leaves of the changes."""
        share = self._products / self._squares if self._squares else 1.0
        return RealisedChanges(
            self._wanted, self._lost, self._wanted, self._wanted * (share if math.isfinite(share) else 1.0)
        )
