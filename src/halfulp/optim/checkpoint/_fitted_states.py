"""Saved states of one parameter, in the dtypes and layouts of the optimizer that loads them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ...mctensor import MCTensor
from ...scaled import ScaledTensor
from ..parameters._local_tensors import local
from ..parameters._parameter_plan import ParameterPlan
from ..parameters._state_tensors import (
    ABSENT,
    BEGUN,
    STORAGE_SUFFIXES,
    check_version,
    saved_tensor,
    saved_value,
    set_initial,
)
from ..rules._update_rule import StateSlot
from ..states._int8_blocks import scale_shape
from ..states._state import Codec
from ..stores._storage import STORES
from ..weight_updates._weight_update import REGISTRY
from ._state_dict_validation import whole_step

# The names of the states of torch.optim's optimizers, under which others keep theirs too.
_TORCH_STATES = (
    "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "grad_avg", "acc_delta",
    "sum", "mu_product", "mu", "eta", "ax", "prev", "step_size", "row_var", "col_var", "variance",
)  # fmt: skip
# Those of them that an option of a group switches off in training, with the option; they stay, as in torch.optim.
_SWITCHED = {"max_exp_avg_sq": "amsgrad", "momentum_buffer": "momentum", "grad_avg": "centered"}


def steps_made(state: Mapping, name: str) -> int:
    """Return the saved step number; torch's SGD saves none, but a momentum buffer implies a step."""
    if "step" not in state and isinstance(state.get("momentum_buffer"), torch.Tensor):
        return 1
    return whole_step(state, name)


def begun(state: Mapping, step: int) -> dict[str, int]:
    """Return the saved entry that says when the states began, if there is one."""
    held = state.get(BEGUN)
    return {BEGUN: held} if isinstance(held, int) and 0 < held <= step else {}


def is_auxiliary(name: str) -> bool:
    """Return whether an entry of a saved state is an auxiliary tensor of a weight update."""
    stores = [STORES[dtype] for dtype in (torch.bfloat16, torch.float16, torch.float32)]
    auxiliary = {key for update in REGISTRY.values() for store in stores for key, _ in update.auxiliary_tensors(store)}
    return name in auxiliary or name.startswith("component_")


def is_kept_by_some_optimizer(name: str) -> bool:
    """Return whether an entry of a saved state is an auxiliary tensor, or a state of torch.optim's or a wrapped one.

    >>> [is_kept_by_some_optimizer(name) for name in ("low_bits", "max_exp_avg_sq", "exp_avg_codes", "my_importance")]
    [True, True, True, False]
    """
    forms = {f"{state}{suffix}" for state in _TORCH_STATES for suffix in STORAGE_SUFFIXES}
    return is_auxiliary(name) or name in forms or name.startswith("base.")


def is_switched_off(name: str, group: Mapping, slots: tuple[StateSlot, ...]) -> bool:
    """Return whether an entry of a saved state is of a state that its group's options have switched off.

    Args:
        name: of the entry.
        group: whose options have.
        slots: the states that are kept under these options.
    """
    kept = {slot.name for slot in slots}
    off = [state for state, option in _SWITCHED.items() if option in group and state not in kept]
    return name in {f"{state}{suffix}" for state in off for suffix in STORAGE_SUFFIXES}


def fit_state(
    plan: ParameterPlan, group: Mapping, codec: Codec, rule_state: StateSlot, names: tuple[str, ...], state: Mapping
) -> dict[str, torch.Tensor]:
    """Return one state of the rule from saved tensors: bit for bit if the dtypes agree, else through float32."""
    given = saved_tensor(state, rule_state.name)
    if given is ABSENT:
        raise ValueError(
            f"state of parameter {plan.name} lacks {rule_state.name!r}: another optimizer saved it ({sorted(state)})"
        )
    if isinstance(given, int):
        raise ValueError(
            f"state {rule_state.name!r} of parameter {plan.name} was saved in 8-bit codes of version {given}, but "
            f"without the codes {rule_state.name + '_codes'!r}: torch.distributed.checkpoint leaves out what this "
            "optimizer does not keep; load the file into one with state_dtype='8bit', and the state_dict of that here"
        )
    if isinstance(given, (ScaledTensor, MCTensor)):
        state = {**state, rule_state.name: (given := given.decode(torch.float32))}
    if given is None and rule_state.name == "momentum_buffer":
        new = {name: torch.zeros_like(plan.tensors[name]) for name in names}
        set_initial(plan.spec, group, new)
        return new
    own = [plan.tensors[name] for name in names]
    if all(_is_same_layout(state.get(name), mine) for name, mine in zip(names, own)):
        check_version(rule_state.name, state)
        return {name: state[name] for name in names}
    is_packed = f"{rule_state.name}_packed" in state
    shape = scale_shape(torch.Size(plan.shape), 2) if is_packed else plan.shape
    like = torch.empty(shape, dtype=torch.float32, device="meta")
    given = checked_shape(plan, rule_state.name, given, like, exact=False)
    value = saved_value(local(given), state, rule_state)
    fresh = [torch.zeros_like(mine) for mine in own]
    codec.encode(fresh, value.to(fresh[0].device).contiguous(), None)
    return dict(zip(names, fresh))


def _is_same_layout(given: object, own: torch.Tensor) -> bool:
    """Return whether a saved tensor can be copied bit for bit."""
    return isinstance(given, torch.Tensor) and (local(given).dtype, local(given).shape) == (own.dtype, own.shape)


def checked_shape(plan: ParameterPlan, name: str, given: object, own: torch.Tensor, exact: bool) -> torch.Tensor:
    """Return a given state tensor; raise ValueError for another shape, or dtype where that counts."""
    if not isinstance(given, torch.Tensor) or local(given).shape != own.shape:
        shape = tuple(given.shape) if isinstance(given, torch.Tensor) else type(given).__name__
        raise ValueError(f"state {name!r} of parameter {plan.name} has shape {shape}, {tuple(own.shape)} is needed")
    if exact and local(given).dtype != own.dtype:
        raise ValueError(f"state {name!r} of parameter {plan.name} is {local(given).dtype}, {own.dtype} is needed")
    return given
