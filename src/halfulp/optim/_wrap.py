"""Any torch optimizer on narrow parameters: it steps float32 copies, whose change enters by a weight update."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, Unpack

import torch
from torch.optim import optimizer as _torch_optimizer
from torch.utils._pytree import tree_leaves, tree_map_only

from .._messages import name_type, quote
from ..formats import Format
from ..mctensor import MCTensor
from ..scaled import ScaledTensor
from ._checkpoint import HALFULP_OPTION_NAMES, check_is_state_dict, is_saved_by_halfulp, walk_saved_parameters
from ._float32 import MAX_ELEMENTS_AT_ONCE, read_float32_weights, split_plans_by_elements
from ._group_options import (
    OptimizerParams,
    WeightUpdateOptions,
    check_hyperparameters,
    parse_options,
    read_default_arguments,
)
from ._optimizer import Optimizer
from ._storage import F32, Store
from .parameters._local_tensors import get_local, is_dtensor, wrap_like_dtensor
from .parameters._narrow_groups import read_parameter_name, walk_group_parameters
from .parameters._outside_writes import reset_stale_auxiliary_tensors
from .parameters._parameter_plan import ParameterPlan
from .parameters._step_spec import StepSpec
from .rules._update_rule import UpdateRule
from .step._batch import convert_to_plain_gradient
from .weight_updates._weight_update import WeightUpdate

BASE_STATE_PREFIX = "base."
# What the groups of the two optimizers do not share.
_UNSHARED_GROUP_KEYS = {*HALFULP_OPTION_NAMES, "params", "param_names"}


def compute_assignment_update(w: Any, g: Any) -> tuple[Any]:
    """Return u and no states; the new weight is g, passed in the gradient's place."""
    return (g - w,)


def return_no_constants(group: Mapping[str, Any], step: int) -> tuple[float, ...]:
    """Return the constants of an assignment, by a function that can be pickled."""
    return ()


ASSIGNMENT_RULE = UpdateRule(
    "assignment", compute_assignment_update, (), return_no_constants, assigns=True, decays=False
)


class ExplicitGradientOptimizer(Optimizer):
    """Rounding, auxiliary tensors, lost updates and checkpoints of Optimizer, for updates computed elsewhere."""

    # `foreach` and its like belong to the wrapped optimizer.
    _refuses_torch_switches = False
    # What parameters step by, during a step.
    _explicit_gradients: Mapping[torch.Tensor, torch.Tensor] = MappingProxyType({})

    def _choose_step_spec(
        self, group: dict[str, Any], parameter: torch.Tensor, gradient: Store | None, name: str
    ) -> StepSpec:
        if isinstance(parameter, ScaledTensor):
            raise ValueError(
                f"parameter {name} is a ScaledTensor, which wrap and EMA do not take: torch.optim's optimizers run on "
                "it unwrapped, and hu.optim's AdamW, Adam, SGD and Lion step it"
            )
        return super()._choose_step_spec(group, parameter, gradient, name)

    def _step_by_gradients(self, given: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Step every parameter that a tensor is given for."""
        self._explicit_gradients = given
        try:
            Optimizer._take_step(self)
        finally:
            del self._explicit_gradients

    def _list_gradients(self, parameters: list[torch.Tensor]) -> list[torch.Tensor | None]:
        return [*map(self._explicit_gradients.get, parameters)]

    def _check_hyperparameters(self, group: dict[str, Any]) -> None:
        if isinstance(group.get("lr"), int | float | torch.Tensor):
            check_hyperparameters({"lr": group["lr"]}, ("lr",))


def wrap(
    optimizer: Callable[..., torch.optim.Optimizer],
    params: OptimizerParams,
    *,
    weight_update: WeightUpdate | str | None = None,
    param_dtype: torch.dtype | str | None = None,
    format: Format | str | None = None,
    seed: int = 0,
    report_interval: int = 50,
    **options: Any,
) -> WrappedOptimizer:
    """Wrap any torch optimizer for bfloat16 or float16 parameters (or a format's values in float32 ones).

    In a step, float32 copies of the weights (auxiliary tensors included) and float32 gradients go through the
    optimizer, and each shadow's change u = new - old, weight decay and all, enters its parameter by the weight update.
    With "split" or "master" the parameters are thus the float32 run's, bit for bit where the gradients are. float32
    parameters are stepped in place, as without wrap.

    Shadows and converted gradients live only during the step: 8 bytes for each of at most 2^21 elements at a time for
    the classes in torch.optim (or of the largest parameter, if that has more), of all elements for any other class;
    4 bytes for each element while the optimizer is made, which may read the weights, not write them. Its states are
    float32 and stay; a file holds those of each parameter. Where hu.optim has the optimizer itself, that one is faster
    and keeps narrow states. It cannot be copied or pickled; `state_dict` carries it over.

    Args:
        optimizer: a class, or a function that makes an instance.
        params: parameters, named parameters or groups, which may also hold the options below.
        weight_update, param_dtype, format, seed, report_interval: see Optimizer. "feedback" is refused: it needs a
            first moment.
        options: the optimizer's own, passed on.

    Returns:
        A torch.optim.Optimizer whose groups hold the options of both; the inner optimizer is `.base`. A closure is
        called once.

    Raises:
        TypeError: nothing that makes an optimizer, such as a living one.
        ValueError: an optimizer of hu.optim, an option that both sides claim, or what Optimizer refuses.
        NotImplementedError: differentiable=True, a state_dtype, an optimizer that cannot follow (Lookahead), or one
            that evaluates the model at points of its own (LBFGS), which narrow parameters would round.

    >>> import torch, halfulp as hu
    >>> w = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    >>> opt = hu.optim.wrap(torch.optim.RMSprop, [w], lr=2.0**-13, weight_update="kahan")
    >>> for _ in range(64):
    ...     w.grad = torch.ones_like(w)
    ...     opt.step()
    >>> bool((w < 1).all())
    True
    """
    if isinstance(optimizer, Optimizer) or (isinstance(optimizer, type) and issubclass(optimizer, Optimizer)):
        raise ValueError("this optimizer has weight updates of its own: give it weight_update= instead of wrapping it")
    if options.pop("state_dtype", None) is not None:
        raise NotImplementedError(
            "state_dtype= with wrap: the wrapped optimizer keeps its states in float32; hu.optim.SGD, Adam, AdamW and "
            "Lion have narrow ones"
        )
    if not callable(optimizer) or isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"wrap takes an optimizer's class and parameters, got {name_type(optimizer)}: give wrap(torch.optim.SGD, "
            "params)"
        )
    narrow: WeightUpdateOptions = {"weight_update": weight_update, "param_dtype": param_dtype, "format": format}
    narrow |= {"seed": seed, "report_interval": report_interval}
    return WrappedOptimizer(optimizer, params, parse_options(options, read_default_arguments(optimizer)), **narrow)


class WrappedOptimizer(ExplicitGradientOptimizer):
    """The optimizer that `wrap` returns."""

    base: torch.optim.Optimizer  # the wrapped one, over float32 shadows that hold memory only during a step
    _can_step_one_parameter = False
    _rule = ASSIGNMENT_RULE

    def __init__(
        self,
        make_optimizer: Callable[..., Any],
        params: Iterable[Any],
        options: dict[str, Any],
        **narrow: Unpack[WeightUpdateOptions],
    ) -> None:
        if isinstance(params, torch.Tensor):
            raise TypeError("params must be an iterable of tensors, of named tensors, or of groups, not one tensor")
        given = list(params)
        if not given:
            raise ValueError("optimizer got an empty parameter list")
        self._shadow_by_parameter: dict[torch.Tensor, torch.Tensor] = {}
        groups = [{**one} for one in given] if isinstance(given[0], Mapping) else [{"params": given}]
        inner = []
        for group in groups:
            members = group["params"]
            if not isinstance(members, set):  # which torch refuses
                group["params"] = members = [members] if isinstance(members, torch.Tensor) else list(members)
            rest = {name: value for name, value in group.items() if name not in _UNSHARED_GROUP_KEYS}
            inner.append({**rest, "params": [self._get_or_make_shadow(member) for member in members]})
        with self._expose_weights_in_shadows(self._shadow_by_parameter, {}):
            base = make_optimizer(inner, **options)
        if not isinstance(base, torch.optim.Optimizer):
            raise TypeError(f"{make_optimizer!r} made {base!r}, which is no torch.optim.Optimizer")
        _refuse_unsupported_step(base)
        _refuse_extra_saved_entries(base)
        if len(base.param_groups) != len(groups):
            raise NotImplementedError(f"{type(base).__name__} regroups its parameters: wrap it with one group of them")
        self.base = base
        for group, own in zip(groups, base.param_groups):
            group.update({name: value for name, value in own.items() if name not in _UNSHARED_GROUP_KEYS})
        super().__init__(groups, dict(base.defaults), **narrow)

    def _get_or_make_shadow(self, member: Any) -> torch.Tensor:
        """Return the tensor that the wrapped optimizer steps instead of a parameter, or pair of name and parameter."""
        parameter = member[1] if isinstance(member, tuple) else member
        if not isinstance(parameter, torch.Tensor):
            raise TypeError(f"an optimizer takes tensors, got {type(parameter).__name__}")
        if parameter not in self._shadow_by_parameter:
            with torch.inference_mode(False):  # steps write it
                shadow = wrap_like_dtensor(_expand_float32_zero_to_local_shape(parameter), parameter)
                self._shadow_by_parameter[parameter] = torch.nn.Parameter(shadow, requires_grad=parameter.requires_grad)
        return self._shadow_by_parameter[parameter]

    @contextmanager
    def _expose_weights_in_shadows(
        self, parameters: Iterable[torch.Tensor], plans: Mapping[torch.Tensor, ParameterPlan]
    ) -> Iterator[None]:
        """Let the wrapped class read copies of the weights while it takes parameters, narrowed ones by their plans."""
        shadows = {parameter: self._shadow_by_parameter[parameter] for parameter in parameters}
        try:
            for parameter, shadow in shadows.items():
                _set_shadow_memory(shadow, _copy_weight_as_float32(parameter, plans.get(parameter)))
            yield
            # Writes by `data`, or to a DTensor's shard, move no version counter.
            for parameter, shadow in shadows.items():
                held, given = get_local(shadow).detach(), _copy_weight_as_float32(parameter, plans.get(parameter))
                if not held.is_meta and not torch.equal(held.view(torch.int32), given.view(torch.int32)):
                    raise NotImplementedError(
                        "the optimizer writes the weights as it takes them, which wrap lets it read alone: write them "
                        "before"
                    )
        finally:
            for parameter, shadow in shadows.items():
                _set_shadow_memory(shadow, _expand_float32_zero_to_local_shape(parameter))

    def _update_base_groups(self) -> None:
        """Make the wrapped optimizer's groups those of this one, over shadows."""
        groups = self.base.param_groups
        del groups[len(self.param_groups) :]
        for k, own in enumerate(self.param_groups):
            shared = {name: value for name, value in own.items() if name not in _UNSHARED_GROUP_KEYS}
            shared["params"] = [self._get_or_make_shadow(parameter) for parameter in own["params"]]
            if k == len(groups):
                known = [plan for one in own["params"] if (plan := self._plans.get(one))]
                narrowed = [plan for plan in known if plan.spec.store is not F32]
                try:
                    with self._expose_weights_in_shadows(own["params"], {plan.parameter: plan for plan in narrowed}):
                        self.base.add_param_group(shared)
                except BaseException:
                    del groups[k:]  # the next step is refused too
                    raise
            else:
                groups[k].clear()
                groups[k].update(shared)
        present = {id(parameter) for own in self.param_groups for parameter in own["params"]}
        for parameter in [one for one in self._shadow_by_parameter if id(one) not in present and one not in self.state]:
            self.base.state.pop(self._shadow_by_parameter.pop(parameter), None)

    def _take_step(self) -> None:
        """Take one step of the wrapped optimizer."""
        for group in self.param_groups:
            self._check_hyperparameters(group)
        plans = [
            self._get_valid_plan(group, position, F32)
            for group, position, parameter in walk_group_parameters(self)
            if parameter.grad is not None
        ]
        self._check_parameter_holders(bool(plans))
        for plan in plans:
            reset_stale_auxiliary_tensors(plan)
        self._update_base_groups()
        if type(self.base).__module__.startswith("torch.optim."):  # steps each parameter by itself
            whole = [plan for plan in plans if plan.spec.store is F32]
            apart = [plan for plan in plans if plan.spec.store is not F32]
            for run in (*([whole] if whole else []), *split_plans_by_elements(apart, MAX_ELEMENTS_AT_ONCE)):
                self._step_parameters_of_plans(run)
        else:
            self._step_parameters_of_plans(plans)

    def _step_parameters_of_plans(self, plans: list[ParameterPlan]) -> None:
        """Let the wrapped optimizer step the shadows of some plans, and write their changes."""
        whole = [plan for plan in plans if plan.spec.store is F32]  # which are their own shadows
        apart = [plan for plan in plans if plan.spec.store is not F32]
        values = dict(zip(map(id, apart), read_float32_weights(apart)))
        try:
            for plan in plans:
                parameter, value = plan.parameter, values.get(id(plan))
                shadow = self._shadow_by_parameter[parameter]
                _set_shadow_memory(shadow, get_local(parameter).detach() if value is None else value)
                shadow.grad = _convert_gradient_to_float32(parameter.grad)
            _step_without_hooks(self.base)
            for own, inner in zip(self.param_groups, self.base.param_groups):
                if claimed := sorted(HALFULP_OPTION_NAMES & inner.keys()):
                    raise ValueError(
                        f"{type(self.base).__name__} writes {claimed} into its groups, which wrap itself uses"
                    )
                own.update({name: inner[name] for name in inner if name not in _UNSHARED_GROUP_KEYS})
            # A float32 parameter's shadow has its memory, but a version counter of its own.
            torch.autograd.graph.increment_version([get_local(plan.parameter) for plan in whole])
            self._step_by_gradients(
                {plan.parameter: self._shadow_by_parameter[plan.parameter].detach() for plan in apart}
            )
        finally:
            for plan in plans:
                shadow = self._shadow_by_parameter[plan.parameter]
                shadow.grad = None
                _set_shadow_memory(shadow, _expand_float32_zero_to_local_shape(plan.parameter))

    def _complete_state_dict(self, saved: dict[str, Any]) -> None:
        """Add the wrapped optimizer's states, in their dtypes, as "base.<name>" beside auxiliary tensors."""
        super()._complete_state_dict(saved)
        _refuse_extra_saved_entries(self.base)  # some of which begin in a step
        state = saved["state"]
        for _, _, parameter, number in walk_saved_parameters(self.param_groups, saved["param_groups"]):
            if held := self.base.state.get(self._get_or_make_shadow(parameter)):
                named = {f"{BASE_STATE_PREFIX}{name}": value for name, value in held.items()}
                state[number] = {**state.get(number, {}), **named}

    def _load_state_dict_without_hooks(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` of this optimizer returned."""
        check_is_state_dict(state_dict)
        if not is_saved_by_halfulp(self.param_groups, state_dict["param_groups"]):
            raise ValueError(
                f"this state_dict was not saved by a wrapped {type(self.base).__name__}: load it into that class itself"
            )
        own, states = dict(state_dict["state"]), {}
        for group, k, parameter, number in walk_saved_parameters(self.param_groups, state_dict["param_groups"]):
            state = own.get(number, {})
            own[number] = {name: value for name, value in state.items() if not name.startswith(BASE_STATE_PREFIX)}
            inner = {
                name.removeprefix(BASE_STATE_PREFIX): value for name, value in state.items() if name not in own[number]
            }
            held, label = self.base.state.get(self._get_or_make_shadow(parameter), {}), read_parameter_name(group, k)
            if held and not inner and own[number].get("step"):
                raise ValueError(
                    f"the file holds no states of {type(self.base).__name__} for parameter {label}, which it has "
                    "stepped: torch's flatten_optimizer_state_dict leaves out what is wrapped; save without it"
                )
            for name, value in inner.items():
                known = held.get(name)
                if torch.is_tensor(value) and torch.is_tensor(known) and value.shape != known.shape:
                    raise ValueError(
                        f"state {name!r} of parameter {label} is of shape {tuple(value.shape)}, not "
                        f"{tuple(known.shape)}"
                    )
                device = None if name == "step" else parameter.device
                move: Any = functools.partial(torch.Tensor.to, device=device, copy=True)
                inner[name] = tree_map_only(torch.Tensor, move, value)
            if inner:
                states[self._get_or_make_shadow(parameter)] = inner
        super()._load_state_dict_without_hooks({**state_dict, "state": own})
        for group, saved in zip(self.param_groups, state_dict["param_groups"]):
            # What the wrapped optimizer, a scheduler or the user has put into a group since is not in the file.
            for name in group.keys() - saved.keys() - self.defaults.keys() - _UNSHARED_GROUP_KEYS:
                del group[name]
        self.base.state.clear()
        self.base.state.update(states)

    def _list_state_tensors(self, plan: ParameterPlan) -> list[torch.Tensor]:
        leaves = tree_leaves(self.base.state.get(self._get_or_make_shadow(plan.parameter), {}))
        own = [get_local(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)]
        return [*super()._list_state_tensors(plan), *own]

    def __getstate__(self) -> dict[str, Any]:
        """Refuse copy and pickle."""
        raise NotImplementedError(
            "a wrapped optimizer cannot be copied or pickled: wrap the class again, and load state_dict() into that"
        )

    def __repr__(self) -> str:
        """Return the wrapped class, then the fields as Optimizer does."""
        return super().__repr__().replace("WrappedOptimizer (", f"wrap({type(self.base).__name__}) (", 1)


def _expand_float32_zero_to_local_shape(parameter: torch.Tensor) -> torch.Tensor:
    """Return a zero expanded to a parameter's local shape, without memory of that size."""
    part = get_local(parameter)
    return torch.zeros((), dtype=torch.float32, device=part.device).expand(part.shape)


def _copy_weight_as_float32(parameter: torch.Tensor, plan: ParameterPlan | None) -> torch.Tensor:
    """Return a float32 copy of a parameter's local weight, by its plan if it has one; zeros of no floating numbers."""
    part = get_local(parameter).detach()
    if plan is not None:
        return read_float32_weights([plan])[0]
    if isinstance(part, (MCTensor, ScaledTensor)):
        return part.decode(torch.float32)
    return (
        part.to(torch.float32, copy=True)
        if part.is_floating_point()
        else _expand_float32_zero_to_local_shape(parameter)
    )


def _set_shadow_memory(shadow: torch.Tensor, values: torch.Tensor) -> None:
    """Point a shadow, or its shard on this rank, to other memory."""
    if is_dtensor(shadow):
        shadow._local_tensor = values
    else:
        shadow.data = values


def _convert_gradient_to_float32(gradient: torch.Tensor | None) -> torch.Tensor | None:
    """Return a gradient in float32, the same object if it is; one that is not strided keeps its layout."""
    if gradient is None or (gradient.dtype == torch.float32 and type(gradient) is torch.Tensor):
        return gradient
    if get_local(gradient) is gradient:
        gradient, _ = convert_to_plain_gradient(gradient, gradient, "a wrapped parameter")
    return gradient if gradient.dtype == torch.float32 else gradient.detach().to(torch.float32)


def is_wrappable(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether `wrap` takes another of this kind with its options, as far as shows without saving this one."""
    try:
        _refuse_unsupported_step(optimizer)
    except (NotImplementedError, ValueError):
        return False
    return True


def _refuse_unsupported_step(base: torch.optim.Optimizer) -> None:
    """Refuse an optimizer whose options, closures or inner optimizers wrap cannot follow."""
    if any(group.get("differentiable") for group in base.param_groups):
        raise NotImplementedError("differentiable=True: the step rounds, which has no derivative")
    if claimed := sorted(HALFULP_OPTION_NAMES & base.defaults.keys()):
        raise ValueError(f"{type(base).__name__} has options {claimed} of its own, which wrap cannot tell from its own")
    wanted, name = inspect.signature(type(base).step).parameters.get("closure"), type(base).__name__
    if wanted is not None and wanted.default is inspect.Parameter.empty:
        raise NotImplementedError(
            f"{name}.step needs a closure, by which it evaluates the model at trial points; narrow parameters would "
            f"round these: step float32 parameters by {name} itself"
        )
    if callable(getattr(base, "train", None)):
        raise NotImplementedError(
            f"{name} switches between two weights by train() and eval(), which narrow parameters would round: take "
            "hu.optim.AdamWScheduleFree or SGDScheduleFree"
        )
    for place, value in vars(base).items():
        # Float32 weights exist during a step of `base` alone: another optimizer has the narrow ones, or no memory yet.
        for inner in tree_leaves(value) if place not in ("param_groups", "state", "defaults") else ():
            if isinstance(inner, torch.optim.Optimizer) and inner is not base:
                raise NotImplementedError(
                    f"{name} holds another optimizer, {type(inner).__name__} in {place!r}, whose parameters wrap "
                    f"cannot put float32 weights behind: step float32 parameters by {name}, or wrap "
                    f"{type(inner).__name__} alone: hu.optim.wrap({type(inner).__name__}, params, ...)"
                )


def _refuse_extra_saved_entries(base: torch.optim.Optimizer) -> None:
    """Refuse a class that saves more than its parameters' states and groups."""
    is_torchs = type(base).state_dict is torch.optim.Optimizer.state_dict
    beside = [] if is_torchs else sorted(base.state_dict().keys() - {"state", "param_groups"})
    if beside := beside + [str(key) for key in base.state if not isinstance(key, torch.Tensor)]:
        raise NotImplementedError(
            f"{type(base).__name__} saves {quote(beside)} beside its parameters' states and groups, which files of "
            "wrap do not hold: keep it in a parameter's state or in a param group"
        )


def _step_without_hooks(base: torch.optim.Optimizer) -> None:
    """Step an optimizer without the hooks of every optimizer's step, which run around the outer step."""
    if base._optimizer_step_pre_hooks or base._optimizer_step_post_hooks:
        raise NotImplementedError("hooks of the wrapped optimizer's step: register them on the one that wrap returned")
    hooks = vars(_torch_optimizer)  # a step may call that of a parent class, which runs them too
    before = {name: hooks[name] for name in ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")}
    hooks.update({name: {} for name in before})
    try:
        base.step()
    finally:
        hooks.update(before)
