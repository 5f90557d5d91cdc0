"""The step specification that a group's options give a parameter, or a refusal."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ...mctensor import MCTensor
from ...scaled import ScaledTensor
from ..rules._update_rule import UpdateRule
from ..states._float8 import PAYLOADS
from ..states._scaled import Scaled
from ..states._state import PAIR, Codec, Int8Blocks, refuse_coarse, resolve_codecs
from ..states._storage import STORES, Store, format_store
from ..step._spec import StepSpec
from ..weight_updates._multicomponent import update_of_components
from ..weight_updates._weight_update import REGISTRY, WeightUpdate, weight_update
from ._local_tensors import index_map_of, local, memory
from ._narrowing import is_kept

# A chunk's row of sums holds as many largest magnitudes, and the weight's.
MOST_SCALED_STATES = 3
NARROW = (torch.bfloat16, torch.float16)


def step_spec_of(
    rule: UpdateRule, group: Mapping, parameter: torch.Tensor, gradient: Store | None, name: str
) -> StepSpec:
    """Return the step specification of a parameter.

    Args:
        rule: the update rule of its group.
        group: its param group.
        parameter: as the user holds it.
        gradient: how its gradient is stored; None for as the parameter.
        name: for messages.

    Raises:
        ValueError: a dtype, option or weight update that does not go together, with what to use instead.
        NotImplementedError: a shard of a scaled tensor.
    """
    own = update_of_components(group, parameter, name) if isinstance(parameter, MCTensor) else None
    scaled, dtype = isinstance(parameter, ScaledTensor), memory(parameter).dtype
    narrows = group["param_dtype"] is not None and dtype == torch.float32 and not is_kept(parameter)
    store = store_of(group["param_dtype"] if narrows else dtype, format_store(group["format"]), name, scaled)
    update = own or _weight_update(group, store, scaled)
    refuse_unscalable(group, parameter, update, name)
    update.check(store)
    refuse_feedback(rule, update)
    codecs = codecs_for(rule, update, group, parameter, store, name)
    factors = tuple(rule.factors(tuple(parameter.shape))) if rule.factors is not None else ()
    return StepSpec(
        rule,
        update,
        store,
        gradient or store,
        codecs,
        scaled=scaled,
        factor_names=factors,
        in_parameter=own is not None,
    )


def _weight_update(group: Mapping, store: Store, scaled: bool) -> WeightUpdate:
    if store.name == "fp32":
        return REGISTRY["exact"]
    default = "stochastic" if scaled else "split8" if store.dtype in NARROW else "kahan"
    return weight_update(default if group["weight_update"] is None else group["weight_update"])


def store_of(dtype: torch.dtype, format_store: Store | None, name: str, scaled: bool = False) -> Store:
    """Return the store of a parameter of some dtype, or of a scaled parameter's payload.

    Raises:
        ValueError: a dtype that cannot be trained here, or format= on a parameter that is not float32.
    """
    if scaled:
        if format_store is not None:
            raise ValueError(f"format= is for plain float32 parameters, but {name} is scaled: leave format out")
        return PAYLOADS[dtype]
    if dtype.is_complex:
        raise ValueError(
            f"parameter {name} is {dtype}: allowed are bfloat16, float16 and float32; give complex parameters to an "
            "optimizer of torch.optim, which takes them, and the others to this one; or store "
            "torch.view_as_real(parameter) as the parameter and use torch.view_as_complex(parameter) in forward"
        )
    if dtype not in STORES:
        raise ValueError(f"parameter {name} is {dtype}: allowed are bfloat16, float16 and float32; convert it first")
    if format_store is None:
        return STORES[dtype]
    if dtype != torch.float32:
        raise ValueError(f"format= keeps values of a format in float32 parameters, but {name} is {dtype}")
    return format_store


def codecs_for(
    rule: UpdateRule, update: WeightUpdate, group: Mapping, parameter: torch.Tensor, store: Store, name: str
) -> tuple[Codec, ...]:
    """Return the codecs of a parameter's states; bfloat16 beside 16-bit parameters unless chosen otherwise."""
    default = torch.bfloat16 if store.dtype in NARROW else torch.float32
    is_scaled = isinstance(parameter, ScaledTensor)
    if is_scaled and store.dtype != torch.float32:
        default = torch.float16
    codecs = resolve_codecs(group["state_dtype"], rule.states, default, parameter.shape)
    if not is_scaled and any(isinstance(codec, Scaled) for codec in codecs):
        raise ValueError(
            f"float16 and fp8 states have one scale per tensor, which plain parameters such as {name} do not take: "
            f"allowed are {_allowed_states(rule)} there, or scale the model by hu.scalify"
        )
    _refuse_many_scales(rule, codecs, name)
    refuse_coarse(rule, codecs, group["state_dtype"])
    if any(isinstance(codec, Int8Blocks) for codec in codecs):
        _refuse_cut_blocks(parameter, codecs, name)
    return codecs


def _refuse_many_scales(rule: UpdateRule, codecs: tuple[Codec, ...], name: str) -> None:
    """Refuse more states under scales than a kernel finds the largest magnitudes of, beside that of the weight."""
    held = [slot.name for slot, codec in zip(rule.states, codecs) if isinstance(codec, Scaled)]
    if len(held) > MOST_SCALED_STATES:
        others = ", ".join(f"{slot!r}: torch.float32" for slot in held[MOST_SCALED_STATES:])
        raise ValueError(
            f"{rule.name} keeps {len(held)} states beside the scaled parameter {name}, but at most "
            f"{MOST_SCALED_STATES} can be stored under scales: give state_dtype={{{others}}}, or torch.bfloat16 there"
        )


def _allowed_states(rule: UpdateRule) -> str:
    """Return the words for the storages that plain parameters' states may have under a rule."""
    exact = {name for slot in rule.states if slot.maximum_of for name in (slot.name, slot.maximum_of)}
    if not exact:
        return f"torch.float32, torch.bfloat16, {PAIR!r} and '8bit'"
    others = " and ".join(f"{{{slot.name!r}: ...}}" for slot in rule.states if slot.name not in exact)
    alone = f", and torch.bfloat16 and '8bit' for {others} alone" if others else ""
    return f"torch.float32 and {PAIR!r}{alone}"


def _refuse_cut_blocks(parameter: torch.Tensor, codecs: tuple[Codec, ...], name: str) -> None:
    block = max(codec.block for codec in codecs if isinstance(codec, Int8Blocks))
    cut = (index_map_of(parameter).runs()[:, 1:] % block).any()
    inner = any(getattr(placement, "dim", 0) for placement in getattr(parameter, "placements", ()))
    if cut or (inner and parameter.shape[-1] % block):
        raise ValueError(
            f"parameter {name} of shape {tuple(parameter.shape)} is sharded so that blocks of {block} 8-bit states "
            "are cut: shard dimension 0, or give it a group with state_dtype=torch.bfloat16"
        )


def refuse_unscalable(group: Mapping, parameter: torch.Tensor, update: WeightUpdate, name: str) -> None:
    """Refuse options that have no meaning for a scaled parameter.

    Raises:
        ValueError: a weight update that keeps bits instead of floats, or param_dtype=.
        NotImplementedError: a shard of a scaled tensor.
    """
    if isinstance(local(parameter), ScaledTensor) and not isinstance(parameter, ScaledTensor):
        raise NotImplementedError(f"parameter {name} is a DTensor of scaled tensors: torch.optim steps it")
    if not isinstance(parameter, ScaledTensor):
        return
    if group["param_dtype"] is not None:
        raise ValueError(
            f"param_dtype= narrows plain parameters, but {name} is scaled: choose the payload's dtype by "
            "hu.scalify(dtype=...) or parameter.cast_(dtype)"
        )
    if not update.scales:
        raise ValueError(
            f"weight_update {update.name!r} keeps bits or debts that a scale does not multiply, and parameter {name} "
            "is scaled: use 'stochastic' (no more memory), 'kahan' (as much again), 'nearest' or 'master'"
        )


def refuse_feedback(rule: UpdateRule, update: WeightUpdate) -> None:
    """Refuse error feedback for rules without a first moment that the update is proportional to."""
    if update.feeds_back and rule.error_feedback is None:
        raise ValueError(
            f"weight_update 'feedback' puts the lost part into a first moment, which {rule.name} does not offer "
            "(it takes a sign, a running maximum, or keeps none): use 'stochastic', 'split8' or 'kahan'"
        )
