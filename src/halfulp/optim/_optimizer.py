"""The optimizer: param groups, state layout and the step's bookkeeping; no arithmetic."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable

import torch

from ..formats import Format
from ..kernels import plain
from ..mctensor import MCTensor
from ..scaled import ScaledTensor
from ..subclass.models import _gathered_states as _whole_states
from ._checkpoint import CheckpointMixin
from ._group_options import SWITCHES, check_group, check_numbers, check_parameters, refuse_torch_switches
from ._local_tensors import index_map_of, local, memory, own_parts
from ._lost_updates import LostUpdateReport, lost_update_report, warn_if_mostly_lost
from ._narrow_groups import (
    agree_on_companions,
    check_narrowing,
    name_of,
    narrow,
    refuse_idle_update,
    refuse_left_behind,
    refuse_overlaps,
    updates_in_effect,
)
from ._narrowing import is_kept
from ._outside_writes import agree, agreement_of, settle
from ._parameter_plan import (
    NARROW,
    Slot,
    allocate,
    codecs_for,
    options_of,
    refuse_feedback,
    refuse_other_dtype,
    refuse_other_states,
    refuse_unscalable,
    still_true,
    store_of,
    wanted_tensors,
)
from ._random_identity import Identity, assign_identities, follow_parameters, note_identities
from ._tensor_map import TensorMap
from .rules._update_rule import UpdateRule
from .states._float8 import PAYLOADS
from .states._format_values import format_store
from .states._state import StateChoice
from .states._storage import STORES, Store
from .step._kernel import Kind
from .step._memory import check_memory, check_parameter, gradient_memory, gradient_store
from .step._run import Tables, make_ready, run_step
from .weight_updates._multicomponent import update_of_components
from .weight_updates._weight_update import REGISTRY, WeightUpdate, weight_update


class Optimizer(CheckpointMixin, torch.optim.Optimizer):
    """What every optimizer here shares; a subclass names its update rule and its hyper-parameters.

    Args:
        params: parameters, named parameters, or param groups, as for torch.optim. With names, random bits are keyed by
            them; without, by position.
        defaults: the hyper-parameters.
        weight_update: how updates enter narrow parameters: a name, a WeightUpdate, or None for "split8" where
            parameters have 16 bits and "stochastic" where they are scaled. float32 parameters (without `format`) need
            none and take none.
        state_dtype: how states are stored: torch.float32, torch.bfloat16, "8bit", "bfloat16x2" (two of them), beside
            scaled parameters torch.float16 and "fp8" (a payload and one scale per tensor), a State, or a dict from
            state name to one of these. By default bfloat16 beside 16-bit parameters, float16 beside scaled ones and
            float32 beside float32 ones. Parameters whose rows (numel / shape[0]) are not a multiple of the block keep
            bfloat16 states under "8bit".
        param_dtype: torch.bfloat16 or torch.float16: narrow float32 parameters in place; the bits that fall off go
            into the companions.
        format: a Format or its name: parameters stay float32 tensors and hold values of that format.
        seed: of the random bits, which depend on (seed, step, parameter, global element index) only. Two optimizers
            over unnamed parameters, or over parameters of the same names, share them: give the second another seed.
        report_interval: steps from one count of lost updates (`report()`) to the next; 0 for never.
    """

    # The option that makes parameters narrow.
    narrowed_by = "param_dtype=torch.bfloat16"
    # As copies are: all groups are there, and the first step is to come.
    _made, _stepped = True, False

    def __init__(
        self,
        params: Iterable,
        defaults: dict,
        *,
        weight_update: WeightUpdate | str | None = None,
        param_dtype: torch.dtype | None = None,
        state_dtype: StateChoice = None,
        format: Format | str | None = None,
        seed: int = 0,
        report_interval: int = 50,
    ) -> None:
        check_parameters(params)
        self._start_caches()
        self._made = False
        own = {"weight_update": weight_update, "state_dtype": state_dtype, "param_dtype": param_dtype}
        super().__init__(
            params, {**defaults, **own, "format": format, "seed": seed, "report_interval": report_interval}
        )
        refuse_idle_update(self, self.param_groups)
        # After all groups were accepted: what is refused leaves every parameter as it was.
        narrow(self, self.param_groups, check_narrowing(self.param_groups))
        self._made = True

    def _start_caches(self) -> None:
        """What is derived from groups and states, and made again after a copy or a load."""
        _whole_states.watch()
        self._slots: TensorMap[Slot] = TensorMap()
        self._set_aside: TensorMap[dict] = TensorMap()
        self._checksums: TensorMap[torch.Tensor] = TensorMap()
        self._identities: TensorMap[Identity] = TensorMap()
        self._tables = Tables()
        self._kinds: dict[tuple[Kind, torch.device], Kind] = {}
        self._plain_kinds: dict[tuple, tuple[Kind, tuple]] = {}
        for group in getattr(self, "param_groups", ()):
            note_identities(group, self._identities)

    def rule(self, group: dict) -> UpdateRule:
        """The update rule of a param group."""
        raise AssertionError("every optimizer has a rule")

    def add_param_group(self, param_group: dict) -> None:
        """Add a group, as torch.optim does; what its parameters cannot do is refused before anything is changed.

        Raises:
            ValueError: a dtype, option or weight update that does not go together, with what to use instead.
        """
        given = param_group["params"] if isinstance(param_group.get("params"), list | tuple) else []
        parameters = [id(entry[1] if isinstance(entry, tuple) else entry) for entry in given]
        if len(set(parameters)) != len(parameters):
            raise ValueError(
                "a param group holds the same parameter twice: it would make two steps in one; name it once"
            )
        before, is_chosen = len(self.param_groups), param_group.get("weight_update") is not None
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self._check_numbers(group)
            check_group(group, self.defaults)
            self._check_switches(group)
            assign_identities(group, self.param_groups[:before])
            for position, parameter in enumerate(group["params"]):
                self._kind(group, parameter, None, name_of(group, position))
            refuse_overlaps(self.param_groups)
            refuse_idle_update(self, [group] if is_chosen else ())
            wrappers = check_narrowing([group]) if self._made else None
        except Exception:
            del self.param_groups[before:]
            raise
        note_identities(group, self._identities)
        if wrappers is not None:
            narrow(self, [group], wrappers)

    def _kind(self, group: dict, parameter: torch.Tensor, gradient: Store | None, name: str) -> Kind:
        """What a step of a parameter consists of; without `gradient`, as it will be once narrowed."""
        part = memory(parameter)
        check_parameter(parameter, part, name)
        if part is not parameter:
            return self._new_kind(group, parameter, gradient, name)
        rule = self.rule(group)
        given = rule, group["weight_update"], group["state_dtype"], group["format"], group["param_dtype"], gradient
        key = (*map(id, given), is_kept(parameter), parameter.dtype, parameter.shape, parameter.device)
        found = self._plain_kinds.get(key)
        if found is None:  # with what its key holds by id
            found = self._plain_kinds[key] = self._new_kind(group, parameter, gradient, name), given
        return found[0]

    def _new_kind(self, group: dict, parameter: torch.Tensor, gradient: Store | None, name: str) -> Kind:
        """The same, by all that decides it."""
        own = update_of_components(group, parameter, name) if isinstance(parameter, MCTensor) else None
        scaled, dtype = isinstance(parameter, ScaledTensor), memory(parameter).dtype
        narrows = group["param_dtype"] is not None and dtype == torch.float32 and not is_kept(parameter)
        store = store_of(group["param_dtype"] if narrows else dtype, format_store(group["format"]), name, scaled)
        update, rule = own or self._weight_update(group, store, scaled), self.rule(group)
        refuse_unscalable(group, parameter, update, name)
        update.check(store)
        refuse_feedback(rule, update)
        codecs = codecs_for(rule, update, group, parameter, store, name)
        kind = Kind(rule, update, store, gradient or store, codecs, scaled=scaled, inside=own is not None)
        return self._kinds.setdefault((kind, local(parameter).device), kind)

    @staticmethod
    def _weight_update(group: dict, store: Store, scaled: bool) -> WeightUpdate:
        if store.name == "fp32":
            return REGISTRY["exact"]
        default = "stochastic" if scaled else "split8" if store.dtype in NARROW else "kahan"
        return weight_update(default if group["weight_update"] is None else group["weight_update"])

    def _settle_groups(self) -> None:
        """Follow what somebody has done to the groups' lists of parameters: names, identities and states go along.

        The states of parameters that are in no group wait beside the optimizer's, as long as their parameters live.
        """
        for group in self.param_groups:
            follow_parameters(group, self.param_groups, self._identities)
        members = {id(parameter) for group in self.param_groups for parameter in group["params"]}
        for parameter in [key for key in self.state if isinstance(key, torch.Tensor) and id(key) not in members]:
            self._set_aside[parameter] = self.state.pop(parameter)
        for group in self.param_groups if len(self._set_aside) else ():
            for parameter in group["params"]:
                if parameter in self._set_aside:
                    self.state[parameter] = self._set_aside.pop(parameter)

    def _prepare(self, group: dict, position: int, gradient: Store) -> Slot:
        """Look at a parameter once, and make the state it lacks."""
        parameter = group["params"][position]
        if parameter not in self._identities or parameter in self._set_aside:
            self._settle_groups()
        (_, identity), name = self._identities[parameter], name_of(group, position)
        kind = self._kind(group, parameter, gradient, name)
        refuse_other_dtype(parameter, kind, name)
        state, shape = self.state[parameter], local(parameter).shape
        wanted = wanted_tensors(kind, shape)
        refuse_other_states(state, wanted, name)
        missing = {key: value for key, value in wanted.items() if key not in state}
        state |= allocate(missing, parameter)
        state.setdefault("step", 0)
        part, known = memory(parameter), self._slots.get(parameter)
        index_map, plain = index_map_of(parameter), part is parameter
        slot = Slot(
            self._slots.reference(parameter),
            options_of(group),
            name,
            identity,
            kind,
            index_map,
            state,
            tuple(local(state[key]) for key in kind.tensors),
            part.data_ptr(),
            index_map.shape,
            part.stride(),
            part.is_contiguous(),
            tuple(other.data_ptr() for other in own_parts(parameter)[1:]),
            plain,
            None if known is None else known.lost,
        )
        if slot.accompanied:
            slot.agreement = agreement_of(parameter, part, known, self._checksums.pop(parameter))
        self._slots[parameter] = slot
        return slot

    def _known(self, group: dict, position: int) -> Slot:
        """What is known of a parameter, looked at anew if it is no longer so."""
        parameter = group["params"][position]
        slot = self._slots.get(parameter)
        if slot is None or not still_true(slot, parameter, self.rule(group), options_of(group), self.state[parameter]):
            slot = self._prepare(group, position, PAYLOADS.get(memory(parameter).dtype, STORES[torch.float32]))
        return slot

    def _look_again(self) -> None:
        """Hold nothing that is known for true; the meters go on."""
        for slot in self._slots.values():
            slot.address = -1
        for group in self.param_groups:
            note_identities(group, self._identities)

    @torch._disable_dynamo  # torch.compiler.disable would import the compiler with this module
    @torch.no_grad()
    def step(self, closure: Callable[[], torch.Tensor] | None = None) -> torch.Tensor | None:
        """One optimizer step.

        Args:
            closure: reevaluates the model and returns the loss, as for torch.optim.

        Raises:
            ValueError: a sparse gradient, a parameter or state whose dtype has changed, or a hyper-parameter that is
                not finite; nothing is written then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._take_step()
        return loss

    def _take_step(self) -> None:
        """Let every parameter that has a gradient make its step."""
        if len(self.state) > sum(len(group["params"]) for group in self.param_groups):
            self._settle_groups()
        batches: dict[tuple[int, bool], list[Slot]] = {}
        try:
            for group in self.param_groups:
                self._collect(group, batches)
            self._meet_wrappers(bool(batches))
            kinds = [
                slots[0].kind.metered_twin if metered else slots[0].kind for (_, metered), slots in batches.items()
            ]
            for kind, slots in zip(kinds, batches.values()):
                make_ready(kind, slots[0].gradient.device.type)
            for kind, slots in zip(kinds, batches.values()):
                run_step(kind, slots, self._tables)
                torch.autograd.graph.increment_version([slot.stepping for slot in slots])
                for slot in slots:
                    slot.state["step"] = slot.step
                    for part, copy in zip(slot.parts, slot.copied or ()):
                        part.copy_(copy)
                    if slot.agreement is not None:
                        agree(slot)
                if kind.metered:
                    warn_if_mostly_lost(slots)
        finally:
            self._tables.end_step()
            for slots in batches.values():
                for slot in slots:
                    slot.stepping = slot.gradient = slot.copied = None

    def _meet_wrappers(self, has_gradients: bool) -> None:
        """At the first step, by which a model is wrapped if it will ever be."""
        if self._stepped:
            return
        agree_on_companions(self)
        if not has_gradients:
            refuse_left_behind(self)
        self._stepped = True

    def _gradient(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """What a parameter steps by."""
        return parameter.grad

    def _check_numbers(self, group: dict) -> None:
        """Check what a scheduler may write; raises ValueError."""
        check_numbers(group)

    def _check_switches(self, group: dict) -> None:
        """Refuse what chooses another implementation in torch.optim."""
        refuse_torch_switches(type(self).__name__, **{name: group.get(name) for name in SWITCHES})

    def _collect(self, group: dict, batches: dict[tuple[int, bool], list[Slot]]) -> None:
        """Sort a group's parameters with gradients into batches of one kind."""
        rule, constants, interval, states = self.rule(group), {}, group["report_interval"], self.state
        options = options_of(group)
        self._check_numbers(group)
        self._guard_feedback(group)
        if len(group["identities"]) != len(group["params"]):
            self._settle_groups()
        known = self._slots.by_id
        for position, parameter in enumerate(group["params"]):
            gradient = self._gradient(parameter)
            if gradient is None:
                continue
            slot = known.get(id(parameter))
            scale = 1.0
            if slot is None or not slot.plain or type(gradient) is not torch.Tensor or gradient.is_neg():
                gradient, scale = gradient_memory(local(gradient), parameter, name_of(group, position))
            if slot is None or not _holds(slot, parameter, gradient, rule, options, states[parameter]):
                slot = self._prepare(group, position, gradient_store(gradient, parameter, name_of(group, position)))
                check_memory(slot, gradient)
            if gradient.shape != slot.shape:
                raise ValueError(
                    f"the gradient of {slot.name} has shape {tuple(gradient.shape)}, the parameter "
                    f"{tuple(slot.shape)}: set .grad to None after a parameter has changed its shape"
                )
            slot.step = step = slot.state["step"] + 1
            slot.constants = constants.get(step) or constants.setdefault(step, tuple(rule.values(group, step)))
            slot.gradient_scale = scale
            slot.gradient = gradient if gradient.is_contiguous() else gradient.contiguous()
            if slot.agreement is not None and slot.agreement.version != parameter._version:
                settle(slot)
            slot.stepping = parameter if slot.plain or slot.kind.scaled else local(parameter)
            if not slot.contiguous:
                slot.copied = tuple(plain(part.detach()).contiguous() for part in own_parts(parameter))
            key = (id(slot.kind), bool(interval) and step % interval == 0)
            if key in batches:
                batches[key].append(slot)
            else:
                batches[key] = [slot]

    def _guard_feedback(self, group: dict) -> None:
        """A debt held in units of the learning rate is repaid in the wrong size when the rate jumps."""
        chosen = group["weight_update"]
        if chosen is None or not weight_update(chosen).feeds_back:
            return
        lr, before = float(group["lr"]), group.get("last_lr")
        group["last_lr"] = lr
        if before and lr and not 0.5 <= lr / before <= 2:
            warnings.warn(
                f"weight_update='feedback' and the learning rate went from {before:.3g} to {lr:.3g} in one step: "
                f"pending rounding errors are repaid {lr / before:.3g} times too large; change it by at most twofold",
                RuntimeWarning,
                stacklevel=4,
            )

    def report(self) -> LostUpdateReport:
        """Which updates rounding cancelled on the metered steps so far, what 8-bit codes do not reach, and cures."""
        return lost_update_report(self._slots.values())

    def bytes_per_parameter(self) -> float:
        """Bytes of weights (and copies that outside writes call for), companions, states and gradients per element."""
        total = elements = 0
        for group in self.param_groups:
            for position, parameter in enumerate(group["params"]):
                slot = self._known(group, position)
                held = [*own_parts(parameter), *slot.tensors.values(), *slot.watched]
                held += [parameter.scale] if slot.kind.scaled else []
                total += sum(tensor.numel() * tensor.element_size() for tensor in held)
                total += local(parameter).numel() * slot.kind.gradient.dtype.itemsize
                elements += local(parameter).numel()
        return total / elements if elements else 0.0

    def __repr__(self) -> str:
        """torch.optim's description, then how each dtype is updated, then the lost updates."""
        return f"{super().__repr__()}\n{updates_in_effect(self)}\n{self.report()}"


def _holds(
    slot: Slot, parameter: torch.Tensor, gradient: torch.Tensor, rule: UpdateRule, options: tuple, state: dict
) -> bool:
    """Whether a parameter can step by a gradient as it is known."""
    fits = gradient.dtype is slot.kind.gradient.dtype and gradient.layout is torch.strided
    return fits and still_true(slot, parameter, rule, options, state)
