"""The controller sets exponents at the end of each iteration, in step with the processes that share gradients."""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from ..formats import Format, fp16
from ..formats._catalog import get_signed
from ..rounding import Nearest, Rounding, Stochastic, get_rounding, mix64
from ..subclass import list_live_sharded_modules, list_shard_groups
from ._policy import Amax, Policy
from ._reports import LastStep
from ._site import (
    GLOBAL_SITE_KEY,
    MAX_EXPONENT,
    MIN_EXPONENT,
    GradientReading,
    Measurement,
    OverflowMemory,
    Site,
    Sites,
    copy_to_host,
    get_local_values,
    group_readings_by_site,
    restore_amax_lost_in_moves,
)
from ._state import load_sites
from .eager._backward import BackwardHooks


def is_measured_iteration(iteration: int, restart: int, interval: int) -> bool:
    """Return whether an iteration is measured.

    From ``restart`` on, which is the start of the training or the iteration after a skipped step, these are the 0th,
    the 1st, one of the 2nd and 3rd, one of the 4th to 7th, and so on to spans of ``interval`` iterations; then one of
    every further span of that length. Which one of a span it is, is pseudo-random: measurements at a fixed distance
    would fall on the same task of losses that take turns.

    >>> [k for k in range(64) if is_measured_iteration(k, 0, 16)]
    [0, 1, 2, 6, 14, 23, 33, 51]
    >>> all(is_measured_iteration(k, 0, 1) for k in range(64))
    True
    """
    since = iteration - restart
    if since == 0:
        return True
    length = min(1 << (since.bit_length() - 1), interval)
    if length < interval:
        first = restart + length
    else:
        # Shorter spans go up to the largest power of two that is less than the interval, and end at its double.
        begin = 1 << (interval - 1).bit_length()
        first = restart + begin + (since - begin) // interval * interval
    return iteration == first + mix64(0, key=first) % length


def find_overflow_sources(measured: list[Measurement]) -> list[Site]:
    """Return the sites where gradients stopped being finite, from a measured backward pass."""
    # An activation's gradient spreads an overflow to all that comes later in backward: of these only the first counts,
    # and none of the parameters that read it; a parameter's gradient spreads nowhere.
    flow = next((one for one in measured if one.kind != "weight" and not one.reading.is_finite), None)
    found = [] if flow is None else [flow.site]
    for site, kinds in group_readings_by_site(measured).items():
        others = [reading.is_finite for kind, reading in kinds.items() if kind != "weight"]
        alone = all(others) and (others or flow is None)
        if "weight" in kinds and not kinds["weight"].is_finite and alone:
            found.append(site)
    return found


def is_overflow_near(readings_by_kind: dict[str, GradientReading], exponent: int) -> bool:
    """Return whether gradients of this size may overflow at an exponent: they reach half of the largest number."""
    return any(
        reading.format is not None and reading.is_finite and math.ldexp(reading.amax, exponent + 1) > reading.format.max
        for reading in readings_by_kind.values()
    )


# For so many intervals an overflow is remembered.
_OVERFLOW_MEMORY_INTERVALS = 8
# After so many skipped steps in a row all exponents of the iteration fall as one scale, by so many powers of two.
_SKIPS_BEFORE_COMMON_DECREASE, _COMMON_EXPONENT_DECREASE = 4, 8
# So far a site stays below the exponent at which it overflowed.
_MAX_MARGIN_BELOW_OVERFLOW_EXPONENT = 4


# processes that share gradients -------------------------------------------------------------------------------

# One for each occasion at which processes meet; they are part of the message.
AGREEMENT_OCCASIONS = ("step", "skipped step", "update")


class GradientSharingProcesses:
    """The processes that share a scaler's gradients, by DistributedDataParallel or FSDP2.

    They meet in the wrapper's own group, at a step, after a skipped one, and at the update of an iteration that was
    measured or skipped, all of which they know alike. Messages tell who is out of step.
    """

    def __init__(self) -> None:
        self._process_groups: list[Any] = []
        self._models: list[weakref.ref[nn.Module]] = []
        self._wrappers: weakref.WeakSet[nn.parallel.DistributedDataParallel] = weakref.WeakSet()

    def add_model(self, model: nn.Module) -> None:
        """Find the process groups of wrappers around a model and in it, and look again whenever it runs."""
        self._models.append(weakref.ref(model))
        self.update_process_groups(model if isinstance(model, nn.parallel.DistributedDataParallel) else None)

    def update_process_groups(self, wrapper: nn.parallel.DistributedDataParallel | None = None) -> None:
        """Look for wrappers of the models, and for FSDP2 in them, once in an iteration, in the forward pass of one."""
        if not dist.is_available() or not dist.is_initialized():
            return
        wrapper = wrapper or nn.parallel.DistributedDataParallel._active_ddp_module
        found = [group for model in self._list_models() for group in _list_fsdp_groups(model)]
        if wrapper is not None:
            self._wrappers.add(wrapper)
            found.insert(0, wrapper.process_group)
        for group in found:
            if dist.get_world_size(group) > 1 and not any(group is known for known in self._process_groups):
                self._process_groups.append(group)

    def _list_models(self) -> list[nn.Module]:
        return [model for one in self._models if (model := one()) is not None]

    def agree_on_minimum(self, occasion: str, iteration: int, values: list[int]) -> list[int]:
        """Return the minimum of each value (two at most) over all processes that share gradients."""
        if not self._process_groups:
            return values
        joins = (wrapper._join_config for wrapper in self._wrappers)
        if any(join.enable and not join.throw_on_early_termination for join in joins):
            raise NotImplementedError(
                "in join() of a DistributedDataParallel some processes run out of inputs, and cannot agree on an "
                "AdaptiveGradScaler's steps: give all as many batches, as DistributedSampler(..., drop_last=True) "
                "does, or take join(throw_on_early_termination=True)"
            )
        place = AGREEMENT_OCCASIONS.index(occasion)
        message = [iteration, -iteration, place, -place, *values, *[0] * (2 - len(values))]
        device = next((p.device for model in self._list_models() for p in model.parameters()), "cpu")
        found = torch.tensor(message, device=device, dtype=torch.int64)
        for group in self._process_groups:
            try:
                dist.all_reduce(found, op=dist.ReduceOp.MIN, group=group)
                least = found.tolist()
            except RuntimeError as error:
                raise RuntimeError(
                    f"AdaptiveGradScaler waited for the other processes at the {occasion} of iteration {iteration}: "
                    "one of them died, or does not call scaler.step() and scaler.update() as often as this one. "
                    f"torch.distributed says: {error}"
                ) from error
            if least[0] != -least[1] or least[2] != -least[3]:
                first, last = AGREEMENT_OCCASIONS[least[2]], AGREEMENT_OCCASIONS[-least[3]]
                others = f"from {least[0]} to {-least[1]}, at {first!r} to {last!r}"
                raise RuntimeError(
                    f"processes that share gradients are out of step: this one is at the {occasion} of iteration "
                    f"{iteration}, all are at iterations {others}. Call scaler.step() and scaler.update() equally "
                    "often in every process, and load the same state in all"
                )
        return least[4 : 4 + len(values)]


def _list_fsdp_groups(model: nn.Module) -> Iterator[Any]:
    """Yield the process groups of FSDP2 in a model; refuse parameters that tensor parallel splits among processes."""
    # Whoever shards a model has loaded these.
    fsdp, dtensor = (sys.modules.get(f"torch.distributed.{name}") for name in ("fsdp", "tensor"))
    if dtensor is None:
        return
    for module in model.modules():
        if fsdp is not None and isinstance(module, fsdp.FSDPModule):
            for group in list_shard_groups(module):
                yield from group.mesh_info.mesh.get_all_groups()
    found = [(name, one) for name, one in model.named_parameters() if isinstance(one, dtensor.DTensor)]
    if found:
        groups = (group for module in list_live_sharded_modules() for group in list_shard_groups(module))
        held = {id(one.sharded_param) for group in groups for one in group.fsdp_params}
        for name, parameter in found:
            if id(parameter) not in held:
                raise ValueError(
                    f"parameter {name!r} is a DTensor of a parallel plan (tensor parallel): processes would hold parts "
                    "of one gradient at exponents of their own. AdaptiveGradScaler takes DistributedDataParallel and "
                    "fully_shard; for tensor parallel take torch.amp.GradScaler, or bfloat16"
                )


class ExponentController:
    """Sets every exponent at the end of an iteration, from measurements and overflows.

    Whether an iteration is measured, and the global exponent, are the same in all processes; others may differ.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        init_exponent: int,
        format: Format | str | torch.dtype | None,
        rounding: Rounding | str,
        interval: int,
        floor: int,
        ceiling: int,
    ) -> None:
        if not isinstance(interval, int) or isinstance(interval, bool) or interval < 1:
            raise ValueError(f"interval is a number of iterations, at least 1, got {interval!r}")
        are_integers = isinstance(floor, int) and isinstance(ceiling, int)
        if not (are_integers and MIN_EXPONENT <= floor <= ceiling <= MAX_EXPONENT):
            raise ValueError(
                f"floor and ceiling are integers, {MIN_EXPONENT} <= floor <= ceiling <= {MAX_EXPONENT}, got {floor!r} "
                f"and {ceiling!r}"
            )
        self.floor, self.ceiling = floor, ceiling
        self.check_bounds("init_scale", init_exponent)
        rounding, format = get_rounding(rounding), None if format is None else get_signed(format)
        if isinstance(rounding, Stochastic) and rounding.seed is not None:
            raise ValueError(
                f"{rounding!r}: gradients are rounded by bits of torch's generator alone; take 'stochastic' and "
                "torch.manual_seed, whose state a checkpoint keeps"
            )
        if format is None and rounding != Nearest():
            raise ValueError(
                f"rounding={rounding.name!r} without a format: the tensors' own dtypes round to nearest; give format= "
                "too"
            )
        self.sites = Sites(init_exponent, uniform=not policy.per_site)
        self.backward = BackwardHooks(self.sites, policy, format, rounding)
        self.processes = GradientSharingProcesses()
        self.backward.update_process_groups = self.processes.update_process_groups
        self.policy = policy
        self.interval = interval
        self.init_exponent = init_exponent
        self.iteration = 0
        # The iteration from which `is_measured_iteration` counts, and how many steps in a row were skipped before it.
        self._restart_iteration = 0
        self._skips_in_row = 0
        self.loss_follower = self.backward.loss_follower
        # Steps since the global exponent last changed.
        self.steps_since_change = 0
        self.losses: list[Tensor] = []
        self._measurements: list[Measurement] = []
        # The sites that overflowed in this iteration, and those of one that was not measured, which all may have.
        self._overflow_sources: dict[Site, None] = {}
        self._suspect_sites: list[Site] = []
        self._is_step_skipped = False
        # Whether exponents are to blame for that: not for a loss that is no number.
        self._has_overflowed = False
        self._is_next_measured = False

    def read_overflow_and_measurements(self, flags: list[Tensor]) -> bool:
        """Read whether any flag is set, and the iteration's measurements, by one copy from the device."""
        binades: list[Tensor] = []
        if self.backward.is_measuring:
            held, self.loss_follower.loss_gradient_binades = self.loss_follower.loss_gradient_binades, []
            binades = [torch.as_tensor(binade, dtype=torch.float32, device=flags[0].device) for binade in held]
        values, measured = self.backward.measurements.read_flags_and_measurements([*flags, *binades])
        self._measurements += measured
        self.loss_follower.host_binades += [int(binade) for binade in values[len(flags) :] if math.isfinite(binade)]
        found = any(value != 0 for value in values[: len(flags)])
        # Gradients that are shared tell all processes the same, but for what is done to them afterwards.
        return not self._agree_on_minimum("step", int(not found))[0]

    def record_and_explain_skipped_step(self) -> LastStep:
        """Record a skipped step and return its reason, with the sites whose gradients overflowed."""
        self._is_step_skipped = True
        backward, global_site = self.backward, self.sites.global_site
        finite = all(copy_to_host([torch.isfinite(get_local_values(loss)).all() for loss in self.losses]))
        found = find_overflow_sources(self._measurements) if finite and self.policy.per_site else []
        finite, unknown = map(bool, self._agree_on_minimum("skipped step", int(finite), int(not found)))
        if not finite:
            return LastStep(False, "the loss is not finite, so that no exponent is to blame; look at the forward pass")
        self._has_overflowed = True
        if not self.policy.per_site:
            self._overflow_sources = {global_site: None}
            words = f"gradients overflowed at the scale of all, 2^{global_site.exponent}"
            return LastStep(False, words, (("global", global_site.exponent),))
        if not found and not unknown:
            return LastStep(False, "gradients overflowed at a site of another process, whose scaler tells which")
        if not found and not backward.is_measuring:
            self._suspect_sites = [site for site in backward.reached_sites if site.format or not site.is_measured]
            return LastStep(False, "gradients overflowed; where, the next step, which is measured, will show")
        # What no site of the model made came from outside, at the global exponent.
        found = found or [global_site]
        self._overflow_sources |= dict.fromkeys(found)
        blamed = tuple((site.key, site.exponent) for site in found)
        words = ", ".join(f"{key} at 2^{exponent}" for key, exponent in blamed)
        return LastStep(False, f"gradients overflowed at {words}", blamed)

    def update_exponents(self, new_global_exponent: int | None) -> None:
        """Set the exponents of the next iteration: the global one alone where it is given by hand."""
        global_site = self.sites.global_site
        if new_global_exponent is not None:
            self._set_clamped_exponent(global_site, new_global_exponent)
        else:
            if self.policy.per_site:
                self._update_site_exponents()
            else:
                self._update_exponent_of_single_scale()
            if self.backward.is_measuring or self._is_step_skipped:
                exponent, calm = self._agree_on_minimum("update", global_site.exponent, int(not self._is_next_measured))
                global_site.exponent, self._is_next_measured = exponent, not calm
        self._begin_iteration()

    def _agree_on_minimum(self, occasion: str, *values: int) -> list[int]:
        """Return the minimum of each value over all processes, at the point that ``occasion`` names."""
        return self.processes.agree_on_minimum(occasion, self.iteration, list(values))

    def check_bounds(self, field: str, exponent: int) -> None:
        """Raise for a scale beyond floor and ceiling."""
        if not self.floor <= exponent <= self.ceiling:
            raise ValueError(f"{field} is 2^{exponent}, beyond floor={self.floor} and ceiling={self.ceiling}")

    def replace_all_exponents(self, exponents: Mapping[str, int]) -> None:
        """Set exponents by hand, all others to 0, and begin a new iteration."""
        for key, exponent in exponents.items():
            if not isinstance(exponent, int):
                raise ValueError(f"the exponent of {key!r} is an integer, got {exponent!r}")
            self.check_bounds(f"the scale of {key!r}", exponent)
        unknown = [key for key in exponents if key not in self.sites]
        if unknown:
            raise ValueError(f"no sites {', '.join(unknown)}; the sites are {', '.join(self.sites)}")
        self.sites.set_reference_binade(None)
        for site in self.sites.values():
            self._set_clamped_exponent(site, exponents.get(site.key, 0))
            site.memory = OverflowMemory()
        self._begin_iteration()

    @property
    def progress_counters(self) -> list[int]:
        """The counters that a state holds beside its sites."""
        counters = [self.iteration, self.steps_since_change, self.backward.is_measuring]
        return [*counters, self._restart_iteration, self._skips_in_row]

    def load_state(self, given: dict[str, Any], progress_counters: list[Any]) -> None:
        """Load the sites of a state, and leave the iteration that is under way."""
        self._clear_iteration()
        load_sites(given, self.sites, self.backward.format or fp16)
        for key, values in given.items():
            self._set_clamped_exponent(self.sites[key], values["exponent"])
        self.iteration, self.steps_since_change, self.backward.is_measuring, *rest = progress_counters
        self._restart_iteration, self._skips_in_row = rest
        reference = given[GLOBAL_SITE_KEY]["reference"]
        self.sites.global_site.reference_binade, self.loss_follower.resume_iteration = reference
        self.loss_follower.begin_iteration(self.iteration)
        self.sites.update_lowest_exponent()

    # sites with exponents of their own ------------------------------------------------------------------------

    def _update_site_exponents(self) -> None:
        """Lower the sites that overflowed, and set the others that were measured by the policy."""
        if self._is_step_skipped and not self._has_overflowed:
            return
        measuring = self.backward.is_measuring
        self._skips_in_row = self._skips_in_row + 1 if self._is_step_skipped else 0
        if not (self._is_step_skipped or measuring):
            return
        narrow = any(one.reading.format for one in self._measurements)
        if self.sites.global_site.reference_binade is None:
            self.loss_follower.update_reference_binade(narrow, self.floor, self.ceiling)
        readings = group_readings_by_site(self._measurements)
        fallen = self._lower_exponents_after_overflow(readings)
        lost = restore_amax_lost_in_moves(
            self.backward.edge_hooks, readings, self.loss_follower.lift_of_measured_iteration
        )
        for site, kinds in readings.items():
            if site not in fallen and all(reading.is_finite for reading in kinds.values()):
                self._set_exponent_by_policy(site, kinds, site in lost)
        self._is_next_measured = bool(lost) or self._increase_exponents_if_all_vanished(readings)
        global_site = self.sites.global_site
        if measuring and not self._overflow_sources and not global_site.amax_history:
            # Nothing narrow is there to say how far it may go: it comes back from an overflow step by step.
            higher = min(self.init_exponent, global_site.exponent + 1)
            self._set_clamped_exponent(global_site, self._limit_below_remembered_overflow(global_site, higher))
        self.loss_follower.update_reference_binade(narrow, self.floor, self.ceiling)
        self.sites.update_lowest_exponent()

    def _lower_exponents_after_overflow(self, readings: dict[Site, dict[str, GradientReading]]) -> Collection[Site]:
        """Lower the sites that overflowed, or may have, and those that the overflow reached; return them."""
        self._record_overflows_of_sites()
        if self._skips_in_row > _SKIPS_BEFORE_COMMON_DECREASE:
            # Lowering single sites did not stop the overflows. No losses are followed for a while where one pass
            # reaches several outputs, of which the first one may mislead.
            if self.loss_follower.has_several_outputs:
                self.loss_follower.resume_iteration = self.iteration + _OVERFLOW_MEMORY_INTERVALS * self.interval
            fallen = {**self.backward.reached_sites, self.sites.global_site: None}
            # The global exponent falls at once to the others, which are far below it by now.
            own = [site for site in fallen if not site.follows_global]
            highest = max(site.exponent for site in own or fallen)
            for site in self.sites.values():
                self._set_clamped_exponent(site, min(site.exponent, highest - _COMMON_EXPONENT_DECREASE))
            return fallen
        reached = [
            site for site, kinds in readings.items() if any(one.format and not one.is_finite for one in kinds.values())
        ]
        fallen = dict.fromkeys([*self._overflow_sources, *self._suspect_sites, *reached])
        for site in fallen:
            # At least to the exponent that the policy derives from its history.
            wanted = None if self.policy.wants_operands else self.policy.exponent(site)
            after = self.policy.exponent_after_overflow(site)
            self._set_clamped_exponent(site, after if wanted is None else min(after, wanted))
        return fallen

    def _record_overflows_of_sites(self) -> None:
        """Count and remember the overflow of each site that is to blame."""
        for site in self._overflow_sources:
            site.overflow_count += 1
            site.memory.recall_overflow_exponent(self.iteration)  # forgets what is old
            site.memory.note_overflow(site.exponent, self.iteration + _OVERFLOW_MEMORY_INTERVALS * self.interval)

    def _set_exponent_by_policy(self, site: Site, kinds: dict[str, GradientReading], arrives_as_zero: bool) -> None:
        """Set the exponent of a measured site that did not overflow; ``arrives_as_zero``: all its gradients do."""
        site.store_readings(kinds)
        exponent = (Amax() if arrives_as_zero else self.policy).exponent(site)
        overflowed = site.memory.exponent
        # Operands alone do not tell of sums for weights.
        tells = not arrives_as_zero and not self.policy.wants_operands
        if overflowed is not None and (site.exponent <= self.floor or (tells and is_overflow_near(kinds, overflowed))):
            # The measurement limits the exponent better than the memory does.
            site.memory.exponent = None
        if exponent is not None:
            limit = self._limit_to_halfway_to_overflow if arrives_as_zero else self._limit_below_remembered_overflow
            self._set_clamped_exponent(site, limit(site, exponent))

    def _increase_exponents_if_all_vanished(self, readings: dict[Site, dict[str, GradientReading]]) -> bool:
        """Raise all measured sites if every gradient was stored as zero."""
        narrow = [reading for kinds in readings.values() for reading in kinds.values() if reading.format]
        if not narrow or self.sites.global_site in readings or any(reading.amax != 0 for reading in narrow):
            return False
        for site in readings:
            higher = 2 * site.exponent - self.policy.exponent_after_overflow(site)
            self._set_clamped_exponent(site, self._limit_to_halfway_to_overflow(site, higher))
        return True

    def _limit_below_remembered_overflow(self, site: Site, exponent: int) -> int:
        """Return the wanted exponent, limited below the last overflow while that is remembered."""
        overflowed = site.memory.recall_overflow_exponent(self.iteration)
        if overflowed is None:
            return exponent
        return min(exponent, overflowed - self._find_overflow_margin(site))

    def _find_overflow_margin(self, site: Site) -> int:
        """Return how many powers of two a site stays below the exponent at which it overflowed."""
        return min(_MAX_MARGIN_BELOW_OVERFLOW_EXPONENT, site.exponent - self.policy.exponent_after_overflow(site))

    def _limit_to_halfway_to_overflow(self, site: Site, exponent: int) -> int:
        """Return the wanted exponent, or one halfway to the last overflow's where it is not below that."""
        overflowed = site.memory.recall_overflow_exponent(self.iteration)
        if overflowed is None or not site.exponent < overflowed <= exponent:
            # A site that is at the overflow's exponent, or above, does not overflow there any more.
            return exponent
        half = (site.exponent + overflowed) // 2
        if self.policy.per_site:
            # All gradients underflow at this exponent: allow it back up halfway.
            site.memory.exponent = max(overflowed, half + self._find_overflow_margin(site))
        return half

    # one scale for all ----------------------------------------------------------------------------------------

    def _update_exponent_of_single_scale(self) -> None:
        """Set the global exponent, for policies with one scale for all gradients."""
        global_site = self.sites.global_site
        readings = group_readings_by_site(self._measurements)
        for site, kinds in readings.items():
            site.store_readings(kinds)
        self._record_overflows_of_sites()
        self.steps_since_change += 1
        since, step = self.steps_since_change, self.iteration + 1
        wanted = self.policy.global_exponent(global_site.exponent, self._is_step_skipped, since, step)
        if wanted is None:
            if not self._is_step_skipped and not self.backward.is_measuring:
                return
            found = self._find_exponent_allowed_by_all_sites(readings)
            wanted = self.policy.exponent_after_overflow(global_site) if self._is_step_skipped else found
        if wanted is not None and (wanted != global_site.exponent or self._is_step_skipped):
            self.steps_since_change = 0
            self._set_clamped_exponent(global_site, wanted)

    def _find_exponent_allowed_by_all_sites(self, readings: dict[Site, dict[str, GradientReading]]) -> int | None:
        """Return the exponent that all measured gradients allow, below an overflow of a loss outside the model."""
        global_site = self.sites.global_site
        found = [self.policy.exponent(site) for site in self.sites.values() if site.amax_history]
        wanted = min((exponent for exponent in found if exponent is not None), default=None)
        if wanted is None and readings:
            # Every gradient is stored as zero.
            wanted = 2 * global_site.exponent - self.policy.exponent_after_overflow(global_site)
        overflowed = global_site.memory.exponent
        if wanted is None or overflowed is None:
            return wanted
        if any(is_overflow_near(kinds, overflowed) for kinds in readings.values()):
            global_site.memory.exponent = None
        return self._limit_to_halfway_to_overflow(global_site, wanted)

    def _set_clamped_exponent(self, site: Site, exponent: int) -> None:
        """Set a site's exponent, clamped to floor and ceiling."""
        site.exponent = max(self.floor, min(self.ceiling, exponent))

    def _begin_iteration(self) -> None:
        """Count an iteration, clear what the last one gathered, and decide whether the next one is measured."""
        self.iteration += 1
        if self._is_step_skipped:
            # An overflow left sites without a measurement, and what comes may overflow, too.
            self._restart_iteration = self.iteration
        is_due = is_measured_iteration(self.iteration, self._restart_iteration, self.interval)
        self.backward.is_measuring = self._is_next_measured or is_due
        followed = self.loss_follower.is_active
        self.loss_follower.begin_iteration(self.iteration)
        if self.loss_follower.is_active and not followed:
            # Exponents of meanwhile are meant for losses of meanwhile.
            self.sites.set_reference_binade(None)
        self._clear_iteration()

    def _clear_iteration(self) -> None:
        """Clear what an iteration has gathered."""
        self.backward.end_iteration()
        for site in self.sites.values():
            site.proposed_bounds.clear()
        for gathered in (self._measurements, self.loss_follower.host_binades, self._suspect_sites, self.losses):
            gathered.clear()
        self._overflow_sources.clear()
        self._is_step_skipped = self._has_overflowed = self._is_next_measured = False
