"""Averaged weights: an exponential moving average that moves in 16 bits, too."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from .._messages import quote, write_differing_names
from ..mctensor import MCTensor
from ..rounding._random_bits import STREAM_VERSION
from ..subclass.models._conversion import check_is_module
from ._checkpoint import copy_as_float32, refuse_other_random_stream_version
from ._float32 import MAX_DEVICE_ELEMENTS_AT_ONCE, MAX_ELEMENTS_AT_ONCE, read_float32_weights, split_plans_by_elements
from ._group_options import WeightUpdateOptions, check_real_number
from ._lost_updates import LostUpdateReport
from ._optimizer import Optimizer, unwrap_halfulp_optimizer
from ._wrap import ExplicitGradientOptimizer
from .parameters._local_tensors import get_local, get_payload, wrap_like_dtensor
from .parameters._narrow_groups import walk_group_parameters
from .parameters._outside_writes import record_payload_version
from .parameters._parameter_plan import ParameterPlan
from .parameters._random_identity import strip_wrapper_prefixes
from .rules._update_rule import UpdateRule
from .weight_updates._weight_update import WeightUpdate, find_weight_update


def compute_average_update(w: Any, g: Any, take: Any) -> tuple[Any]:
    """Return u = (1 - decay) (g - w), with the live weight in the gradient's place."""
    return (take * (g - w),)


def compute_ema_decay(group: Mapping[str, Any], step: int) -> float:
    """Return the decay of an update; updates count from 1."""
    given = group["decay"]
    decay = given(step) if callable(given) else given
    check_real_number("decay", decay)
    decay = float(decay)
    if not 0 <= decay <= 1:
        which = f"decay(step={step}) gave {decay}" if callable(given) else f"decay={decay}"
        raise ValueError(f"{which}: a decay is from 0 (the last weights) to 1 (the first ones), 0.999 for example")
    return decay


AVERAGING_RULE = UpdateRule(
    "average", compute_average_update, (), lambda group, step: (1 - compute_ema_decay(group, step),), decays=False
)


class AverageUpdateOptimizer(ExplicitGradientOptimizer):
    """The optimizer that moves averages towards the live weights, which stand for its gradients."""

    narrowing_option = "dtype=torch.bfloat16"

    _rule = AVERAGING_RULE

    def _check_parameter_holders(self, has_gradients: bool) -> None:
        """Do nothing: no wrapper holds averages."""

    def get_plan_by_average(self) -> dict[torch.Tensor, ParameterPlan]:
        """Return the plan of every average."""
        group = self.param_groups[0]
        return {average: self._get_valid_plan(group, k) for k, average in enumerate(group["params"])}


class EMA:
    """a <- a + (1 - decay) (w - a) for every weight w of a model, the averages kept as narrow as the weights.

    A bfloat16 average rounded to nearest never moves, for (1 - decay) |w - a| stays under half an ulp of a (5,000
    updates at decay .999 from 1 towards 0: still 1.0, where float32 has .0067). Here the difference enters by a weight
    update, with auxiliary tensors, so that the average follows float32's at 3 bytes per parameter.

    Args:
        model: whose parameters are averaged; tied ones once. Averages start as the weights are now. Its buffers are
            copied as they are at each update.
        decay: in [0, 1], or a function from the update's number n, from 1 on, to it; min(0.999, (1 + n) / (10 + n))
            forgets the start early.
        optimizer: the hu.optim optimizer of the model, or a trainer's wrapper round it, if it keeps auxiliary tensors:
            then the float32 weights are averaged, not the parameters that show them rounded.
        weight_update: how differences enter; see Optimizer. "feedback" is refused.
        dtype: of the averages of floating parameters; by default the parameter's own.
        seed, report_interval: see Optimizer.

    Raises:
        TypeError: no module, or an optimizer that is not of hu.optim.
        ValueError: a decay outside [0, 1], or a dtype or weight update that does not go together.

    >>> import torch, halfulp as hu
    >>> model = torch.nn.Linear(1, 1, bias=False).bfloat16()
    >>> _ = torch.nn.init.ones_(model.weight)
    >>> ema = hu.optim.EMA(model, 0.999)
    >>> _ = torch.nn.init.zeros_(model.weight)
    >>> for _ in range(1000):
    ...     ema.update()
    >>> round(float(ema.float32_state_dict()["weight"]), 2)
    0.37
    >>> with ema.apply():
    ...     bool(model.weight > 0.3)
    True
    >>> bool(model.weight == 0)
    True
    """

    def __init__(
        self,
        model: torch.nn.Module,
        decay: float | Callable[[int], float] = 0.999,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        weight_update: WeightUpdate | str | None = None,
        dtype: torch.dtype | None = None,
        seed: int = 0,
        report_interval: int = 50,
    ) -> None:
        check_is_module(model, "EMA")
        stepping = None if optimizer is None else unwrap_halfulp_optimizer(optimizer, "optimizer=", "leave it out")
        compute_ema_decay({"decay": decay}, 1)
        self.model: torch.nn.Module = model
        self.optimizer: Optimizer | None = stepping
        self.updates: int = 0
        live = dict(model.named_parameters())
        if not live:
            raise ValueError("the model has no parameters to average")
        if stepping is not None:
            stepped = {id(parameter) for _, _, parameter in walk_group_parameters(stepping)}
            if not any(id(tensor) in stepped for tensor in live.values()):
                raise ValueError(
                    "optimizer= steps none of the model's parameters: give the optimizer of this model, or leave it out"
                )
        self._buffer_copies = {name: value.detach().clone() for name, value in model.named_buffers()}
        self._averages = {name: torch.empty_like(w.detach(), dtype=dtype or w.dtype) for name, w in live.items()}
        named = [(f"average of {name}", average) for name, average in self._averages.items()]
        options: WeightUpdateOptions = {
            "weight_update": weight_update,
            "seed": seed,
            "report_interval": report_interval,
        }
        self._average_optimizer = AverageUpdateOptimizer(named, {"decay": decay}, **options)
        plans = self._average_optimizer.get_plan_by_average()
        with torch.no_grad():
            for weights in self._read_live_weights(live):
                for name, weight in weights.items():
                    plan = plans[self._averages[name]]
                    value = weight.decode(torch.float32) if isinstance(weight, MCTensor) else get_local(weight).float()
                    plan.spec.update.fill(plan.spec.store, plan.weight_tensors, value.contiguous())
                    record_payload_version(plan)

    @torch._disable_dynamo
    @torch.no_grad()
    def update(self) -> None:
        """Move the averages towards the weights; call it after each optimizer step.

        Raises:
            ValueError: a parameter whose shape, dtype or device no longer fits its average.
        """
        live = self._read_live_parameters()
        for weights in self._read_live_weights(live):
            self._average_optimizer._step_by_gradients(
                {self._averages[name]: weight for name, weight in weights.items()}
            )
        for name, value in self.model.named_buffers():
            self._buffer_copies[name] = value.detach().clone()
        self.updates += 1

    def _read_live_parameters(self) -> dict[str, torch.Tensor]:
        """Return the model's parameters by name, each once; raises ValueError for others than those averaged."""
        live: dict[str, torch.Tensor] = dict(self.model.named_parameters())
        changed = sorted(live.keys() ^ self._averages.keys())
        for name, mine in self._averages.items():
            if not changed and (live[name].shape != mine.shape or live[name].device != mine.device):
                changed = [name]
        if changed:
            raise ValueError(
                f"{quote(changed)} are other tensors than those averaged: make a new EMA after changing the model"
            )
        return live

    def _read_live_weights(self, live: Mapping[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
        """Yield the weights, in float32 if the optimizer has auxiliary tensors for them."""
        names, held = {weight: name for name, weight in live.items()}, []
        optimizer: Any = self.optimizer
        for group, position, parameter in () if optimizer is None else walk_group_parameters(optimizer):
            if parameter in names and (optimizer.state.get(parameter) or isinstance(parameter, MCTensor)):
                plan = optimizer._get_valid_plan(group, position)
                if plan.spec.update.describe_auxiliary_tensors(plan.spec.store):
                    held.append(plan)
        read = {plan.parameter for plan in held}
        if shown := {name: weight.detach() for name, weight in live.items() if weight not in read}:
            yield shown
        on_cpu = all(get_payload(plan.parameter).is_cpu for plan in held)
        for plans in split_plans_by_elements(held, MAX_ELEMENTS_AT_ONCE if on_cpu else MAX_DEVICE_ELEMENTS_AT_ONCE):
            values = read_float32_weights(plans)
            yield {
                names[plan.parameter]: wrap_like_dtensor(value, plan.parameter) for plan, value in zip(plans, values)
            }

    @contextlib.contextmanager
    def apply(self) -> Iterator[torch.nn.Module]:
        """Return a context in which the model's weights are the averages; afterwards it is exactly as before.

        The weights wait in a copy, so the block needs their memory once more. Do not step an optimizer inside. An
        optimizer's float32_state_dict is there that of the averages as the model shows them.
        """
        plans, buffers = self._average_optimizer.get_plan_by_average(), self.model.named_buffers()
        shown = [(buffer, self._buffer_copies[name]) for name, buffer in buffers if name in self._buffer_copies]
        for name, tensor in self._read_live_parameters().items():
            mine = self._averages[name]
            shown.append((tensor, mine if mine.dtype == tensor.dtype else _read_float32_weight(plans[mine])))
        with contextlib.ExitStack() as restored:
            for tensor, value in shown:
                # With their bits the versions come back, by which the optimizer sees writes from outside.
                restored.enter_context(torch.autograd._unsafe_preserve_version_counter(tensor))
                restored.callback(_copy_into, tensor, tensor.detach().clone())
                _copy_into(tensor, value)
            yield self.model

    def float32_state_dict(self) -> dict[str, torch.Tensor]:
        """Return the model's state_dict in float32, with the averages in place of the weights."""
        mine = {id(tensor): self._averages[name] for name, tensor in self.model.named_parameters()}
        plans, found = self._average_optimizer.get_plan_by_average(), {}
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            if id(tensor) in mine:
                found[name] = _read_float32_weight(plans[mine[id(tensor)]])
            else:
                found[name] = copy_as_float32(name, self._buffer_copies.get(name, tensor))
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return plain data that loads with weights_only: {"updates", "weight_update", "random_stream", "tensors"}.

        "tensors" holds every average under its parameter's name in the model, without what torch.compile and
        activation checkpointing put into names, beside it each auxiliary tensor as "<name>.<tensor>", and the copied
        buffers.
        """
        tensors, plans = dict(self._buffer_copies), self._average_optimizer.get_plan_by_average()
        for name, mine in self._averages.items():
            tensors[name] = mine
            tensors |= {f"{name}.{key}": wrap_like_dtensor(value, mine) for key, value in plans[mine].tensors.items()}
        updates = {plan.spec.update.name: plan.spec.update.to_dict() for plan in plans.values()}
        return {
            "updates": self.updates,
            "weight_update": list(updates.values()),
            "random_stream": STREAM_VERSION,
            "tensors": _strip_key_prefixes(tensors, False),
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned, also of the same model before or after DistributedDataParallel wrapped it.

        Raises:
            ValueError: other names, shapes or dtypes, another weight update, or stochastic rounding under another
                version of the stream of random bits; nothing is changed.
        """
        if not isinstance(state_dict, Mapping) or not {"updates", "weight_update", "tensors"} <= state_dict.keys():
            raise ValueError("this is no state_dict of an EMA: it needs 'updates', 'weight_update' and 'tensors'")
        own = self.state_dict()
        tensors, given = _strip_key_prefixes(own["tensors"]), _strip_key_prefixes(state_dict["tensors"])
        saved = [find_weight_update(entry) for entry in state_dict["weight_update"]]
        if saved != [find_weight_update(entry) for entry in own["weight_update"]]:
            raise ValueError(f"the averages were saved with weight_update={saved}: make this EMA with the same")
        plans = self._average_optimizer.get_plan_by_average()
        if any(plan.spec.draws_random_bits for plan in plans.values()):
            refuse_other_random_stream_version("the EMA", "the state_dict", state_dict)
        missing, foreign = sorted(tensors.keys() - given.keys()), sorted(given.keys() - tensors.keys())
        if missing or foreign:
            raise ValueError(
                f"the state_dict {write_differing_names(missing, foreign)}: give one of an EMA of this model"
            )
        for name, tensor in tensors.items():
            wanted, found = ((one.dtype, tuple(one.shape)) for one in (tensor, given[name]))
            if wanted != found:
                raise ValueError(f"{name} is {found[0]} of shape {found[1]}, {wanted[0]} of {wanted[1]} is needed")
        updates = state_dict["updates"]
        if not isinstance(updates, int) or updates < 0:
            raise ValueError(f"updates={updates!r} is not a whole number from 0 on")
        for name, tensor in tensors.items():
            tensor.copy_(given[name])
        for mine, plan in plans.items():
            self._average_optimizer.state[mine]["step"] = updates
            record_payload_version(plan)
        self.updates = updates

    def report(self) -> LostUpdateReport:
        """Return which updates of the averages rounding cancelled, as Optimizer.report does."""
        return self._average_optimizer.report()

    def __repr__(self) -> str:
        """Return the decay, the updates so far, and the lost updates."""
        group = self._average_optimizer.param_groups[0]
        return f"EMA(decay={group['decay']}, updates={self.updates})\n{self.report()}"


def _strip_key_prefixes(
    tensors: Mapping[str, torch.Tensor], strips_data_parallel: bool = True
) -> dict[str, torch.Tensor]:
    """Return tensors under their names in the plain model, or as they are where two would have one name."""
    names = strip_wrapper_prefixes(tensors, strips_data_parallel)
    return dict(zip(names if len(set(names)) == len(names) else tensors, tensors.values()))


@torch.no_grad()
def _copy_into(tensor: torch.Tensor, value: torch.Tensor) -> None:
    tensor.copy_(value)


def _read_float32_weight(plan: ParameterPlan) -> torch.Tensor:
    return wrap_like_dtensor(read_float32_weights([plan])[0], plan.parameter)
