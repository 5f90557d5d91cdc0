"""Any torch optimizer on narrow parameters: it steps float32 copies, whose change enters by a weight update."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Unpack, overload

import torch
from torch.optim import optimizer as _torch_optimizer
from torch.utils._pytree import tree_leaves, tree_map_only

from .._messages import a_kind, listed
from ..formats import Format
from ..scaled import ScaledTensor
from ._checkpoint import is_halfulp_file, refuse_confusing_keys
from ._float32 import ALIGNMENT_ELEMENTS, MOST_RUN_ELEMENTS, Float32Buffer, read_weights, split_into_runs
from ._group_options import NarrowOptions, ParamGroups, check_hyperparameters, read_defaults, read_options
from ._optimizer import Loss, Optimizer, keep_states_aside
from ._storage import F32, Store
from .parameters._local_tensors import get_local, is_dtensor, place_like
from .parameters._narrow_groups import read_parameter_name, walk_model_parameters
from .parameters._outside_writes import reset_if_stale
from .parameters._parameter_plan import ParameterPlan
from .parameters._step_spec import StepSpec
from .parameters._tensor_map import TensorMap
from .rules._update_rule import UpdateRule
from .step._batch import convert_to_plain_gradient
from .weight_updates._weight_update import WeightUpdate

BASE_PREFIX = "base."
OUTER_OPTIONS = ("weight_update", "state_dtype", "param_dtype", "format", "seed", "report_interval", "identities")
# What the groups of the two optimizers do not share.
_UNSHARED_KEYS = (*OUTER_OPTIONS, "params", "param_names")


def assign_weight(w: Any, g: Any) -> tuple[Any]:
    """Return u and no states; the new weight is g, passed in the gradient's place."""
    return (g - w,)


def make_no_constants(group: Mapping[str, Any], step: int) -> tuple[float, ...]:
    """Return the constants of an assignment, by a function that can be pickled."""
    return ()


ASSIGNMENT_RULE = UpdateRule("assignment", assign_weight, (), make_no_constants, assigns=True, decays=False)


class ExplicitGradientOptimizer(Optimizer):
    """Rounding, auxiliary tensors, lost updates and checkpoints of Optimizer, for updates computed elsewhere."""

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

    def _step_by(self, given: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Step every parameter that a tensor is given for."""
        self._explicit_gradients = given
        try:
            self._take_step()
        finally:
            del self._explicit_gradients

    def _list_gradients(self, parameters: list[torch.Tensor]) -> list[torch.Tensor | None]:
        return [*map(self._explicit_gradients.get, parameters)]

    def _check_hyperparameters(self, group: dict[str, Any]) -> None:
        if isinstance(group.get("lr"), int | float | torch.Tensor):
            check_hyperparameters({"lr": group["lr"]}, ("lr",))

    def _check_torch_switches(self, group: dict[str, Any]) -> None:
        """Accept all: these options belong to the wrapped optimizer."""


def wrap(
    optimizer: Callable[..., torch.optim.Optimizer],
    params: ParamGroups,
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
    the classes in torch.optim (or of the largest parameter, if that has more), of all elements for any other class. The
    optimizer's states are float32 and stay; a file holds what the class itself would save. Where hu.optim has the
    optimizer itself, that one is faster and keeps narrow states.

    Args:
        optimizer: a class, or a function that makes an instance; `load_state_dict` takes the states of one over.
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
            f"wrap takes an optimizer's class and parameters, got {a_kind(optimizer)}: give wrap(torch.optim.SGD, "
            "params), and load the states of a living optimizer, wrapped.load_state_dict(optimizer.state_dict())"
        )
    options = read_options(options, read_defaults(optimizer))
    return WrappedOptimizer(
        optimizer,
        params,
        options,
        weight_update=weight_update,
        param_dtype=param_dtype,
        format=format,
        seed=seed,
        report_interval=report_interval,
    )


class WrappedOptimizer(ExplicitGradientOptimizer):
    """The optimizer that `wrap` returns.

    Attributes:
        base: the wrapped optimizer, over float32 shadows that hold memory only during a step.
    """

    base: torch.optim.Optimizer
    _can_step_one_parameter = False
    _rule = ASSIGNMENT_RULE

    def __init__(
        self,
        make: Callable[..., Any],
        params: Iterable[Any],
        options: dict[str, Any],
        **narrow: Unpack[NarrowOptions],
    ) -> None:
        if isinstance(params, torch.Tensor):
            raise TypeError("params must be an iterable of tensors, of named tensors, or of groups, not one tensor")
        given = list(params)
        if not given:
            raise ValueError("optimizer got an empty parameter list")
        self._shadows: TensorMap[torch.Tensor] = TensorMap()
        self._base_states_outside_groups: TensorMap[dict[str, Any]] = TensorMap()
        pairs = [self._split_group(one) for one in (given if isinstance(given[0], Mapping) else [{"params": given}])]
        base = make([inner for inner, _ in pairs], **options)
        if not isinstance(base, torch.optim.Optimizer):
            raise TypeError(f"{make!r} made {base!r}, which is no torch.optim.Optimizer")
        _refuse_unfollowed(base)
        if len(base.param_groups) != len(pairs):
            raise NotImplementedError(f"{type(base).__name__} regroups its parameters: wrap it with one group of them")
        self.base = base
        groups = [outer | _list_group_options(inner) for (_, outer), inner in zip(pairs, base.param_groups)]
        super().__init__(groups, dict(base.defaults), **narrow)

    def _split_group(self, group: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return a group over shadows for the wrapped optimizer, and the same over the parameters."""
        members = group["params"]
        if not isinstance(members, set):  # which torch refuses
            members = [members] if isinstance(members, torch.Tensor) else list(members)
        inner = []
        for member in members:
            parameter = member[1] if isinstance(member, tuple) else member
            if not isinstance(parameter, torch.Tensor):
                raise TypeError(f"an optimizer takes tensors, got {type(parameter).__name__}")
            shadow = self._find_shadow(parameter)
            inner.append((member[0], shadow) if isinstance(member, tuple) else shadow)
        rest = {name: value for name, value in group.items() if name not in (*OUTER_OPTIONS, "params")}
        return {**rest, "params": inner}, {**group, "params": members}

    def _find_shadow(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the tensor that the wrapped optimizer steps instead of a parameter."""
        if parameter not in self._shadows:
            placeholder = place_like(_make_placeholder(parameter), parameter)
            self._shadows[parameter] = torch.nn.Parameter(placeholder, requires_grad=parameter.requires_grad)
        return self._shadows[parameter]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to both optimizers; what either refuses is added to none."""
        if not self._is_built:
            super().add_param_group(param_group)
            return
        self._follow_parameter_edits()
        inner, outer = self._split_group(param_group)
        self.base.add_param_group(inner)
        try:
            super().add_param_group(outer | _list_group_options(self.base.param_groups[-1]))
        except Exception:
            del self.base.param_groups[-1]
            raise

    def _update_edited_groups(self) -> None:
        super()._update_edited_groups()
        if self._is_built:
            self._follow_parameter_edits()

    def _follow_parameter_edits(self) -> None:
        """Make the wrapped optimizer's groups those of this one, which users may edit, over shadows."""
        groups = self.base.param_groups
        del groups[len(self.param_groups) :]
        groups += [{"params": []} for _ in self.param_groups[len(groups) :]]
        for own, inner in zip(self.param_groups, groups):
            inner["params"][:] = map(self._find_shadow, own["params"])
            # The groups may have changed places.
            for name in inner.keys() - own.keys():
                del inner[name]
            inner.update({name: own[name] for name in own if name not in (*OUTER_OPTIONS, "params")})
        shadows = [shadow for inner in groups for shadow in inner["params"]]
        keep_states_aside(self.base.state, self._base_states_outside_groups, shadows)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], Loss]) -> Loss: ...

    @torch._disable_dynamo  # torch.compiler.disable would import the compiler with this module
    @torch.no_grad()
    def step(self, closure: Callable[[], Loss] | None = None) -> Loss | None:
        """Take one step of the wrapped optimizer.

        Args:
            closure: reevaluates the model and returns the loss, as for torch.optim.

        Raises:
            ValueError: a learning rate that is not finite, or a parameter whose dtype has changed to one that cannot
                be stepped; nothing is written then.
        """
        for group in self.param_groups:
            self._check_hyperparameters(group)
        self._follow_parameter_edits()
        self._check_wrappers(any(parameter.grad is not None for _, _, parameter in walk_model_parameters(self)))
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        runs = self._list_runs(list(self._walk_plans(lambda p: p.grad is not None)))
        sizes = (sum(math.prod(plan.shape) + ALIGNMENT_ELEMENTS for plan in plans) for plans in runs)
        buffer = Float32Buffer(2 * max(sizes, default=0))  # of the largest run's weights and gradients
        for plans in runs:
            self._step_run(plans, buffer)
        return loss

    def _list_runs(self, plans: list[ParameterPlan]) -> list[list[ParameterPlan]]:
        """Return the runs of plans that step together: all, unless the wrapped optimizer steps each parameter alone."""
        if (
            not type(self.base).__module__.startswith("torch.optim.")
            or self.base._optimizer_step_pre_hooks
            or self.base._optimizer_step_post_hooks
        ):
            return [plans]
        whole = [plan for plan in plans if plan.spec.store is F32]
        apart = [plan for plan in plans if plan.spec.store is not F32]
        return [*([whole] if whole else []), *split_into_runs(apart, MOST_RUN_ELEMENTS)]

    def _walk_plans(self, wanted: Callable[[torch.Tensor], bool]) -> Iterable[ParameterPlan]:
        for group, position, parameter in walk_model_parameters(self):
            if wanted(parameter):
                plan = self._find_valid_plan(group, position, F32)
                reset_if_stale(plan)
                yield plan

    def _step_run(self, plans: list[ParameterPlan], buffer: Float32Buffer) -> None:
        """Let the wrapped optimizer step the shadows of some plans, and write their changes."""
        whole = [plan for plan in plans if plan.spec.store is F32]  # which are their own shadows
        apart = [plan for plan in plans if plan.spec.store is not F32]
        buffer.clear()
        values = dict(zip(map(id, apart), read_weights(apart, buffer)))
        try:
            for plan in plans:
                parameter, value = plan.parameter, values.get(id(plan))
                shadow = self._shadows[parameter]
                _point_shadow(shadow, get_local(parameter).detach() if value is None else value)
                shadow.grad = _widen_gradient(parameter.grad, buffer)
            for own, inner in zip(self.param_groups, self.base.param_groups):
                inner.update({name: own[name] for name in own if name not in _UNSHARED_KEYS})
            with _without_global_hooks():
                self.base.step()
            for own, inner in zip(self.param_groups, self.base.param_groups):
                if claimed := sorted({*OUTER_OPTIONS} & inner.keys()):
                    raise ValueError(
                        f"{type(self.base).__name__} writes {claimed} into its groups, which wrap itself uses"
                    )
                own.update({name: inner[name] for name in inner if name not in _UNSHARED_KEYS})
            # A float32 parameter's shadow has its memory, but a version counter of its own.
            torch.autograd.graph.increment_version([get_local(plan.parameter) for plan in whole])
            self._step_by({plan.parameter: self._shadows[plan.parameter].detach() for plan in apart})
        finally:
            for plan in plans:
                shadow = self._shadows[plan.parameter]
                shadow.grad = None
                _point_shadow(shadow, _make_placeholder(plan.parameter))

    def _state_dict_before_hooks(self) -> dict[str, Any]:
        """Return the wrapped optimizer's states, in their dtypes, as "base.<name>" beside auxiliary tensors."""
        saved = super()._state_dict_before_hooks()
        _refuse_own_entries(self.base)  # some of which begin in a step
        state, inner = saved["state"], dict(self.base.state)
        for group, packed in zip(self.param_groups, saved["param_groups"]):
            for parameter, number in zip(group["params"], packed["params"]):
                if held := inner.get(self._shadows[parameter]):
                    named = {f"{BASE_PREFIX}{name}": value for name, value in held.items()}
                    state[number] = {**state.get(number, {}), **named}
        inner = {key: value for key, value in inner.items() if not isinstance(key, torch.Tensor)}
        refuse_confusing_keys(inner)
        state |= {f"{BASE_PREFIX}{key}" if isinstance(key, str) else key: value for key, value in inner.items()}
        return saved

    def _load_state_dict_without_hooks(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` of this optimizer, or of the wrapped class itself, returned.

        The latter's 16-bit states become float32, and the auxiliary tensors stay as they are.
        """
        own, inner = _split_base_states(state_dict, self.param_groups)
        self._update_edited_groups()
        inner = self._fit_base_states(own, inner)
        super()._load_state_dict_without_hooks(own)
        for group, saved in zip(self.param_groups, own["param_groups"]):
            # What the wrapped optimizer, a scheduler or the user has put into a group since is not in the file.
            for name in group.keys() - saved.keys() - self.defaults.keys() - {*_UNSHARED_KEYS}:
                del group[name]
        self._follow_parameter_edits()
        self.base.state.clear()
        self.base.state.update(inner)

    def _fit_base_states(self, own: Mapping[Any, Any], inner: Mapping[Any, Any]) -> dict[torch.Tensor, Any]:
        """Return the wrapped optimizer's states by shadow, on the parameters' devices."""
        fitted = {key: value for key, value in inner.items() if not isinstance(key, int)}
        for group, packed in zip(self.param_groups, own["param_groups"]):
            for k, (parameter, number) in enumerate(zip(group["params"], packed["params"])):
                label, shadow = read_parameter_name(group, k), self._shadows[parameter]
                state, held = inner.get(number, {}), self.base.state.get(shadow, {})
                if held and not state and own["state"].get(number, {}).get("step"):
                    raise ValueError(
                        f"the file holds no states of {type(self.base).__name__} for parameter {label}, "
                        "which it has stepped: torch's flatten_optimizer_state_dict leaves out what is wrapped; save "
                        "without it"
                    )
                for name, value in state.items():
                    known = held.get(name)
                    if torch.is_tensor(value) and torch.is_tensor(known) and value.shape != known.shape:
                        raise ValueError(
                            f"state {name!r} of parameter {label} has shape {tuple(value.shape)}, "
                            f"{tuple(known.shape)} is needed"
                        )
                    device = None if name == "step" else parameter.device
                    move: Any = functools.partial(torch.Tensor.to, device=device, copy=True)
                    fitted.setdefault(shadow, {})[name] = tree_map_only(torch.Tensor, move, value)
        return fitted

    def bytes_per_parameter(self) -> float:
        """Return bytes per element of weights, auxiliary tensors, states and gradients, as held between steps."""
        total = elements = 0
        for plan in self._walk_plans(lambda _: True):
            parameter = plan.parameter
            leaves = tree_leaves(self.base.state.get(self._shadows[parameter], {}))
            tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
            gradient = parameter if parameter.grad is None else parameter.grad
            held = [get_local(t) for t in (parameter, gradient, *tensors)] + list(plan.tensors.values()) + plan.watched
            total += sum(t.numel() * t.element_size() for t in held)
            elements += plan.parts[0].numel()
        return total / elements if elements else 0.0

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copy and pickle: the wrapped optimizer by class and fields, without hooks."""
        own = super().__getstate__()
        shadows = [(parameter, self._shadows[parameter]) for _, _, parameter in walk_model_parameters(self)]
        own |= {"_shadows": shadows, "base": None}
        # Without a step that a scheduler has bound to it.
        fields = {k: v for k, v in vars(self.base).items() if k != "step" and not k.endswith("_hooks")}
        return {**own, "_inner": (type(self.base), fields)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore from `__getstate__`."""
        (kind, fields), shadows = state.pop("_inner"), state.pop("_shadows")
        super().__setstate__(state)
        self._shadows, self._base_states_outside_groups = TensorMap(shadows), TensorMap()
        self.base = object.__new__(kind)
        self.base.__setstate__(fields)

    def __repr__(self) -> str:
        """Return the wrapped class, then the fields as Optimizer does."""
        return super().__repr__().replace("WrappedOptimizer (", f"wrap({type(self.base).__name__}) (", 1)


def _list_group_options(inner: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a group of the wrapped optimizer, without its parameters."""
    return {name: value for name, value in inner.items() if name not in ("params", "param_names")}


def _make_placeholder(parameter: torch.Tensor) -> torch.Tensor:
    """Return a zero expanded to a parameter's local shape, without memory of that size."""
    part = get_local(parameter)
    return torch.zeros((), dtype=torch.float32, device=part.device).expand(part.shape)


def _point_shadow(shadow: torch.Tensor, values: torch.Tensor) -> None:
    """Point a shadow, or its shard on this rank, to other memory."""
    if is_dtensor(shadow):
        shadow._local_tensor = values
    else:
        shadow.data = values


def _widen_gradient(gradient: torch.Tensor | None, buffer: Float32Buffer) -> torch.Tensor | None:
    """Return a gradient in float32, the same object if it is; one that is not strided keeps its layout."""
    if gradient is None or (gradient.dtype == torch.float32 and type(gradient) is torch.Tensor):
        return gradient
    if get_local(gradient) is gradient:
        gradient, _ = convert_to_plain_gradient(gradient, gradient, "a wrapped parameter")
    if gradient.dtype == torch.float32:
        return gradient
    part = get_local(gradient.detach())
    if part.layout is not torch.strided:
        return gradient.detach().to(torch.float32)
    return place_like(buffer.take(part).copy_(part), gradient)


def _refuse_unfollowed(base: torch.optim.Optimizer) -> None:
    """Refuse an optimizer whose options, closures, inner optimizers or files wrap cannot follow."""
    if any(group.get("differentiable") for group in base.param_groups):
        raise NotImplementedError("differentiable=True: the step rounds, which has no derivative")
    if claimed := sorted(set(OUTER_OPTIONS) & base.defaults.keys()):
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
    _refuse_own_entries(base)


def _refuse_own_entries(base: torch.optim.Optimizer) -> None:
    """Refuse a class that saves more than states and groups."""
    is_torchs = type(base).state_dict is torch.optim.Optimizer.state_dict
    if beside := [] if is_torchs else sorted(base.state_dict().keys() - {"state", "param_groups"}):
        raise NotImplementedError(
            f"{type(base).__name__} saves {listed(beside)} beside states and groups, which files of wrap do not hold: "
            "keep it in optimizer.state or in a param group"
        )


def _split_base_states(
    state_dict: Mapping[str, Any], groups: list[dict[str, Any]]
) -> tuple[dict[str, Any], dict[Any, Any]]:
    """Split a state_dict into one without the wrapped optimizer's states, and these by number."""
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
        raise ValueError("this is no optimizer state_dict: it needs the keys 'state' and 'param_groups'")
    is_wrapped = is_halfulp_file(groups, state_dict["param_groups"])
    numbers = {number for group in state_dict["param_groups"] for number in group["params"]}
    own, inner = dict[Any, Any](), dict[Any, Any]()
    for key, state in state_dict["state"].items():
        if key not in numbers:  # the user's, or the wrapped optimizer's
            is_inner = str(key).startswith(BASE_PREFIX) or not is_wrapped
            held = inner if is_inner else own
            held[key.removeprefix(BASE_PREFIX) if is_inner and isinstance(key, str) else key] = state
        elif is_wrapped:
            own[key] = {k: v for k, v in state.items() if not k.startswith(BASE_PREFIX)}
            inner[key] = {k.removeprefix(BASE_PREFIX): v for k, v in state.items() if k.startswith(BASE_PREFIX)}
        else:
            own[key] = {"step": torch.as_tensor(float(state.get("step", 0)), dtype=torch.float32, device="cpu")}
            inner[key] = tree_map_only(
                torch.Tensor, lambda t: t.float() if t.dtype in (torch.bfloat16, torch.float16) else t, state
            )
    return {**state_dict, "state": own}, inner


@contextlib.contextmanager
def _without_global_hooks() -> Iterator[None]:
    """Return a context without the hooks of every optimizer's step, which run around the outer step."""
    hooks = vars(_torch_optimizer)
    before = {name: hooks[name] for name in ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")}
    hooks.update({name: {} for name in before})
    try:
        yield
    finally:
        hooks.update(before)
