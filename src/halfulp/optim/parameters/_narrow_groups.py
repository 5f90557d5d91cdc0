"""A group's parameters: their names, narrowing in place, and checks against wrappers and holders."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from ...subclass.models._parameter_holders import (
    check_parameter_holders,
    install_registration_hooks,
    list_live_data_parallel_modules,
    list_live_instances,
    list_live_sharded_modules,
    refuse_overlapping_memory,
    replace_parameter_data,
    reset_shards,
)
from .._group_options import check_ranks_agree
from .._storage import STORE_BY_DTYPE
from ._local_tensors import get_local, is_dtensor
from ._narrowing import is_marked_to_stay_float32, pop_kept_float32_values, refuse_values_beyond
from ._outside_writes import record_payload_version


def check_holders_and_list_sharded(groups: Iterable[dict]) -> list[torch.nn.Module]:
    """Find other holders of the float32 parameters that groups ask to be narrowed; refuse values beyond the dtype."""
    named = []
    for group, position in _find_parameters_to_narrow(groups):
        name, parameter = read_parameter_name(group, position), group["params"][position]
        refuse_values_beyond(parameter, group["param_dtype"], name, "give it a param group with param_dtype=None")
        named.append((name, parameter))
    return check_parameter_holders(named, "param_dtype=", replaced=False)


def narrow_group_parameters(optimizer: Any, groups: Iterable[dict], sharded: list[torch.nn.Module]) -> None:
    """Narrow float32 parameters in place if so asked; the low bits, also of `halfulp.convert`, become auxiliary."""
    to_narrow = {id(group["params"][position]) for group, position in _find_parameters_to_narrow(groups)}
    install_registration_hooks()
    for group in groups:
        for position, parameter in enumerate(group["params"]):
            if id(parameter) in to_narrow:
                value = parameter.detach()
                replace_parameter_data(parameter, torch.empty_like(value, dtype=group["param_dtype"]))
            else:
                value = pop_kept_float32_values(parameter)
            if value is not None:
                plan = optimizer._make_plan(group, position, STORE_BY_DTYPE[parameter.dtype])
                plan.spec.update.fill(plan.spec.store, plan.weight_tensors, get_local(value).contiguous())
                record_payload_version(plan)
    reset_shards(sharded)


def _find_parameters_to_narrow(groups: Iterable[dict]) -> Iterator[tuple[dict, int]]:
    for group in groups:
        for position, parameter in enumerate(() if group["param_dtype"] is None else group["params"]):
            if parameter.dtype == torch.float32 and not is_marked_to_stay_float32(parameter):
                yield group, position


def read_parameter_name(group: dict, position: int) -> str:
    """Return a parameter's qualified name if names were given, else its position."""
    names = group.get("param_names")
    return names[position] if names and position < len(names) else f"#{position}"


def walk_group_parameters(optimizer: torch.optim.Optimizer) -> Iterator[tuple[dict[str, Any], int, torch.Tensor]]:
    """Yield group, position and parameter of all that an optimizer steps."""
    for group in optimizer.param_groups:
        for position, parameter in enumerate(group["params"]):
            yield group, position, parameter


def check_sharded_ranks(optimizer: Any) -> None:
    """Check that all processes with parts of the same parameters train in the same way; all of them must call this."""
    sharded = [p for group in optimizer.param_groups for p in group["params"] if is_dtensor(p)]
    for mesh, parameter in {parameter.device_mesh: parameter for parameter in sharded}.items():
        for group in mesh.get_all_groups() if mesh.get_coordinate() is not None else ():
            if torch.distributed.get_backend(group) != "fake":  # whose collectives bring nothing
                check_ranks_agree(optimizer, group, get_local(parameter).device)


def check_data_parallel_ranks(optimizer: Any) -> None:
    """Check that all processes under DistributedDataParallel train in the same way; all of them must call this."""
    # It writes weights when it is made, which resets auxiliary tensors of before: they are the same on all processes.
    stepped = {id(parameter) for _, _, parameter in walk_group_parameters(optimizer)}
    for module in list_live_data_parallel_modules():
        # Of a share of the parameters that is a rank's own (ZeroRedundancyOptimizer) numbers are not compared.
        narrow = next((p for p in module.parameters() if p.dtype in STORE_BY_DTYPE and p.dtype != torch.float32), None)
        if narrow is not None and any(id(parameter) in stepped for parameter in module.parameters()):
            check_ranks_agree(optimizer, module.process_group, narrow.device)


def refuse_replaced_parameters(optimizer: Any) -> None:
    """Raise if fully_shard has replaced the parameters, which then never have gradients."""
    parameters = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    if not list_live_sharded_modules() or any(hasattr(p, "_local_tensor") for p in parameters.values()):
        return
    modules = map(vars, list_live_instances(torch.nn.Module))
    if not any(id(p) in parameters for held in modules for p in held.get("_parameters", {}).values()):
        raise ValueError(
            "no parameter of this optimizer has a gradient or belongs to a module any more: fully_shard makes new "
            "parameters, so make the optimizer after it"
        )


def refuse_overlapping_parameters(groups: Iterable[dict]) -> None:
    """Raise for two parameters that share memory: each step would write the other too."""
    places = [(group, position) for group in groups for position in range(len(group["params"]))]
    named = [(read_parameter_name(group, position), group["params"][position]) for group, position in places]
    is_exact = all(group["param_dtype"] is None and group["format"] is None for group, _ in places)
    if not is_exact or any(parameter.dtype != torch.float32 for _, parameter in named):
        refuse_overlapping_memory(named, "a narrow weight")


def refuse_unused_weight_update(optimizer: Any, groups: Iterable[dict]) -> None:
    """Raise if no parameter can use the weight update that was chosen for its group; some may be float32."""
    idle = None
    for group in groups:
        chosen = group["weight_update"]
        for position, parameter in enumerate(group["params"]) if chosen is not None and chosen.name != "exact" else ():
            name = read_parameter_name(group, position)
            if optimizer._choose_step_spec(group, parameter, None, name).update.name != "exact":
                return
            if idle is None and not is_marked_to_stay_float32(parameter):
                idle = name, chosen.name
    if idle is not None:
        raise ValueError(
            f"weight_update={idle[1]!r} is for parameters of few bits, and all of these are float32 (such as "
            f"{idle[0]}): give {optimizer.narrowing_option} as well, or leave weight_update out"
        )
