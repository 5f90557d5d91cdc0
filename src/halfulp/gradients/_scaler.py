"""AdaptiveGradScaler: torch's GradScaler with an exponent for every gradient."""

from __future__ import annotations

import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import OptState, _refresh_per_optimizer_state

from .._messages import name_type
from ..formats import Format
from ..kernels import break_graph_and_run_eagerly
from ..rounding import Rounding
from ._controller import ExponentController
from ._policy import Policy, get_policy
from ._reports import LastStep, SiteRow, SiteTable
from ._site import GLOBAL_SITE_KEY, MAX_EXPONENT, get_exponent_of_power_of_two_scale
from ._state import add_new_sites, check_saved_sites_match, convert_sites_to_plain_data, read_site_entries_by_key
from .eager._attach import attach_scaler

Outputs = TypeVar("Outputs", bound=Tensor | list[Any] | tuple[Any, ...])


class AdaptiveGradScaler(torch.amp.GradScaler):
    """Loss scaling with a power of two of its own for every gradient, exact, and without a change to the model.

    Each product of the model (linear layer, convolution, attention, ...) opens a *site* with an integer exponent e: in
    ``scaler.scale(loss).backward()`` gradients there are stored as 2^e times the true ones, and an edge between two
    sites multiplies by 2^(difference). Exponents belong to tensors and not to paths, so that joins agree; the
    gradients of parameters arrive as under GradScaler, times ``get_scale()``. In float32 nothing changes, not one bit:
    ``halfulp.verify`` shows it on a model. The method is that of "Adaptive Loss Scaling for Mixed Precision Training"
    and "Improving Loss Scaling by Gradient Scaling" (Zhao et al., arXiv 1910.12385 and IJCAI-20) with exponents as
    potentials instead of scales that travel.

    Use it as `torch.amp.GradScaler`, under ``torch.autocast`` with float32 parameters, or with float16 parameters
    after `halfulp.float32_gradients`. Only what is differentiated from ``scaler.scale(...)`` is scaled; other
    backward passes, their hooks and ``torch.autograd.grad`` see true gradients. In a scaled one hooks of parameters,
    inputs and outputs see ``get_scale()`` times the true ones, and hooks of tensors inside the model their site's.
    With ``create_graph=True`` exponents rest at one global scale until ``update()``, and a warning says so.

    Args:
        model: The module whose forward pass makes the gradients, or a sequence of several. Data-parallel wrappers are
            looked through. Give it before it is compiled.
        policy: How exponents follow from measurements: ``"amax"``, ``"underflow-bound"``, ``"element-wise"``,
            ``"abs-range"``, or with one scale for all ``"constant"``, ``"measured"``, ``"dynamic"``,
            ``"rising-floor"``; or a Policy with other options.
        init_scale: A power of two, where all exponents start.
        interval: A measurement every so many iterations, and after an overflow; the first ones are measured more often.
        format: A format to which all gradients that products read or make are rounded, to train as if on hardware
            that has it: ``"e5m2"``, ``"fp16"``, any Format. None leaves gradients in their tensors' dtypes.
        rounding: How, with ``format``: ``"stochastic"`` loses nothing on average, and as little to underflow.
        floor, ceiling: The least and the greatest exponent, from -60 to 60, for a loss of the last measured size.
        float32_outputs: Whether float16 outputs of the model become float32, so that the gradient of a loss computed
            outside is not rounded before it is scaled; None does so under autocast to float16, where sites have
            exponents of their own.
        enabled: False makes all methods those of a disabled GradScaler, and leaves the model alone.

    Raises:
        TypeError: no module, or a float16 parameter whose gradient is float16 (at the first forward pass).
        ValueError: a model that is compiled or scaled already, or an option that is not allowed.

    >>> import torch, halfulp as hu
    >>> model = torch.nn.Linear(4, 2)
    >>> scaler = hu.AdaptiveGradScaler(model)
    >>> opt = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> scaler.scale(model(torch.ones(3, 4)).square().mean()).backward()
    >>> scaler.step(opt); scaler.update()
    >>> print(scaler.last_step)
    applied
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        *,
        policy: Policy | str = "amax",
        init_scale: float = 2.0**16,
        interval: int = 16,
        format: Format | str | torch.dtype | None = None,
        rounding: Rounding | str = "nearest",
        floor: int = -30,
        ceiling: int = MAX_EXPONENT,
        float32_outputs: bool | None = None,
        enabled: bool = True,
    ) -> None:
        models, policy = list_models(model), get_policy(policy)
        device = next((p.device.type for one in models for p in one.parameters()), "cpu")
        super().__init__(device, init_scale=init_scale, enabled=enabled)
        self.last_step: LastStep | None = None
        # By a parameter's identity: the gradient that was divided since the last update.
        self._unscaled_gradients: dict[int, weakref.ref[Tensor]] = {}
        # Those that were there when the iteration before ended, of its scale or unscaled, with their versions then.
        self._left_over_gradients: dict[int, tuple[weakref.ref[Tensor], object]] = {}
        self._tensor_exponent: int | None = None
        self._models = [weakref.ref(one) for one in models]
        self._scale_was_read = False
        self._growth_interval = getattr(policy, "growth_interval", 2000)
        self._controller = ExponentController(
            policy,
            init_exponent=get_exponent_of_power_of_two_scale("init_scale", init_scale),
            format=format,
            rounding=rounding,
            interval=interval,
            floor=floor,
            ceiling=ceiling,
        )
        self._detach_functions: list[Callable[[], None]] = []
        if self._enabled:
            backward = self._controller.backward
            wide = float32_outputs if backward.policy.per_site or float32_outputs else False
            try:
                for i, one in enumerate(models):
                    prefix = str(i) if len(models) > 1 else ""
                    # A compiled forward pass does not tell who called it.
                    self._controller.processes.add_model(one)
                    self._detach_functions.append(attach_scaler(one, backward, wide=wide, prefix=prefix))
            except (TypeError, ValueError):
                self.detach()
                raise

    # what GradScaler has --------------------------------------------------------------------------------------

    @break_graph_and_run_eagerly
    @overload
    def scale(self, outputs: Outputs) -> Outputs: ...
    @overload
    def scale(self, outputs: Iterable[Any]) -> Iterable[Any]: ...
    def scale(self, outputs: Any) -> Any:
        """Return the loss times ``get_scale()``; a backward pass from there has exponents. Nested lists and tuples too.

        Raises:
            ValueError: the loss reads a tensor that left the model by another way than its output.
        """
        if not self._enabled:
            return outputs
        if isinstance(outputs, (list, tuple)):
            return type(outputs)(self.scale(one) for one in outputs)
        if not isinstance(outputs, Tensor):
            if isinstance(outputs, Iterable):
                return map(self.scale, outputs)
            raise ValueError("outputs must be a Tensor or an iterable of Tensors")
        backward = self._controller.backward
        backward.deactivate_hooks_outside_backward()
        if outputs.grad_fn is not None and not backward.uses_one_scale:
            backward.refuse_tensors_from_inside_models(outputs.grad_fn)
        scaled = outputs * self._make_scale_tensor(outputs.device)
        if scaled.requires_grad:
            node: Any = scaled.grad_fn
            node.register_prehook(backward.activate_edge_hooks)
        self._controller.losses.append(outputs.detach())
        return scaled

    @break_graph_and_run_eagerly
    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients of an optimizer's parameters by ``get_scale()``, for instance before clipping.

        Gradients set by hand are multiplied by ``get_scale()`` before.

        Raises:
            ValueError: no `scale` or `get_scale` since the last update; an optimizer that shares a parameter with one
                that was unscaled.
            RuntimeError: called twice, or after step.
        """
        if not self._enabled:
            return
        controller = self._controller
        by_hand = (controller.losses or self._scale_was_read) and not all(
            map(self._is_gradient_left_over, _list_parameters_with_gradients(optimizer))
        )
        if not (controller.backward.pass_count or by_hand):
            raise ValueError(
                "there is nothing to unscale, as no backward pass started at scaler.scale(loss) since the last "
                "scaler.update(): call scaler.scale(loss).backward(), or multiply gradients that you set by hand by "
                "scaler.get_scale(), and replace p.grad or write it without .data. Step all optimizers of one pass "
                "before update(), which prepared ones of accelerate and Lightning call each: there call "
                "scaler.step(one.optimizer) for each, then scaler.update(). A stage of a pipeline without a loss gets "
                "its gradients from another process, at a scale that this one does not know: in pipelines train in "
                "bfloat16, or multiply the loss by a constant power of two and divide every stage's gradients by it"
            )
        controller.backward.deactivate_hooks_outside_backward()
        self._make_scale_tensor(torch.device(self._device))
        super().unscale_(optimizer)
        self._per_optimizer_states[id(optimizer)]["passes"] = controller.backward.pass_count

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Unscale gradients as GradScaler does; refuse those that another optimizer's unscaling has divided already."""
        parameters = list(_list_parameters_with_gradients(optimizer))
        for parameter in parameters:
            divided = self._unscaled_gradients.get(id(parameter))
            if divided is not None and divided() is parameter.grad:
                raise ValueError(
                    f"two optimizers share a parameter, of shape {list(parameter.shape)}, whose gradient was unscaled "
                    "for the other one already: give each parameter to one optimizer, or call scaler.update() and a "
                    "backward pass of its own before each step"
                )
        flags: dict[torch.device, Tensor] = {}
        for alike in _group_by_device_mesh(parameters):
            held: Any = SimpleNamespace(param_groups=[{"params": alike}])
            for device, flag in super()._unscale_grads_(held, inv_scale, found_inf, allow_fp16).items():
                flags[device] = torch.maximum(flags[device], flag) if device in flags else flag
        self._unscaled_gradients |= {id(one): weakref.ref(one.grad) for one in parameters if one.grad is not None}
        return flags

    def _is_gradient_left_over(self, parameter: Tensor) -> bool:
        """Return whether a gradient was there when the iteration before ended, and was not written since."""
        gradient, version = self._left_over_gradients.get(id(parameter), (None, None))
        left = gradient() if gradient is not None else None
        return left is not None and left is parameter.grad and _read_version(left) == version

    @break_graph_and_run_eagerly
    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Step the optimizer if all gradients are finite, unscaling them first if needed; return its result.

        ``last_step`` says whether it was applied. The one synchronisation with the device is here, as GradScaler's.
        An optimizer that could handle overflow itself (``_step_supports_amp_scaling``) is treated as any other.

        Raises:
            ValueError: as `unscale_`; no gradients; a closure is given.
            RuntimeError: called twice since the last update.
        """
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        if "closure" in kwargs or any(map(callable, args)):
            raise ValueError("a closure would be called without the scale: call backward first, and step without one")
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("step() has already been called since the last update().")
        if state["stage"] is OptState.UNSCALED and state["passes"] != self._controller.backward.pass_count:
            raise ValueError(
                "a scaled backward pass ran after unscale_(), so that gradients may still hold the scale, or be sums "
                "of both: unscale and step after all backward passes of an iteration, call zero_grad() before the next "
                "one, and call scaler.update() between the passes of a step that has several, such as a "
                "sharpness-aware one"
            )
        if state["stage"] is OptState.READY:
            self.unscale_(optimizer)
        if self._controller.backward.pass_count:
            self._controller.backward.warn_if_no_watched_forward_ran()
        flags = list(state["found_inf_per_device"].values())
        if not flags:
            raise ValueError(
                "the optimizer's parameters have no gradients: there is nothing to step with. Leave this step out"
            )
        state["stage"] = OptState.STEPPED
        overflowed = self._controller.read_overflow_and_measurements(flags)
        self.last_step = self._controller.record_and_explain_skipped_step() if overflowed else LastStep(applied=True)
        return None if overflowed else optimizer.step(*args, **kwargs)

    @break_graph_and_run_eagerly
    def update(self, new_scale: float | Tensor | None = None) -> None:
        """End the iteration: lower the exponents that overflowed, set measured ones by the policy.

        Args:
            new_scale: A power of two that the global scale is set to instead.

        Raises:
            ValueError: no gradients were checked since the last update, or a scale that is no power of two, or beyond
                floor and ceiling.
        """
        if not self._enabled:
            return
        states = list(self._per_optimizer_states.values())
        if not any(state["found_inf_per_device"] for state in states):
            raise ValueError(
                "update() before a step: no gradients were checked since the last update(); call "
                "scaler.step(optimizer), or scaler.unscale_(optimizer), first"
            )
        exponent = None if new_scale is None else get_exponent_of_power_of_two_scale("new_scale", float(new_scale))
        if exponent is not None:
            self._controller.check_bounds("new_scale", exponent)
        unread = [state for state in states if state["stage"] is OptState.UNSCALED]
        flags = [flag for state in unread for flag in state["found_inf_per_device"].values()]
        if flags and self._controller.read_overflow_and_measurements(flags):
            self.last_step = self._controller.record_and_explain_skipped_step()
        self._controller.update_exponents(new_global_exponent=exponent)
        self._clear_iteration()

    def _clear_iteration(self) -> None:
        """Clear what is known of the gradients of an iteration."""
        self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)
        gradients = {key: live for key, one in self._unscaled_gradients.items() if (live := one()) is not None}
        for model in filter(None, (one() for one in self._models)):
            gradients |= {id(p): p.grad for p in model.parameters() if p.grad is not None}
        self._left_over_gradients = {key: (weakref.ref(x), _read_version(x)) for key, x in gradients.items()}
        self._unscaled_gradients.clear()
        self._scale_was_read = False

    def get_scale(self) -> float:
        """Return the global scale: a scaled loss over the loss, and a parameter's scaled gradient over the true one.

        It need not fall where a step is skipped, as sites have scales of their own: ask ``last_step.applied``.
        """
        self._scale_was_read = True
        return self._compute_global_scale()

    def _compute_global_scale(self) -> float:
        return 2.0**self._controller.sites.global_site.exponent if self._enabled else 1.0

    def _make_scale_tensor(self, device: torch.device) -> Tensor:
        """Return the global scale as GradScaler's tensor."""
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(device)
        assert self._scale is not None
        if self._tensor_exponent != self._controller.sites.global_site.exponent:
            # A new tensor, as autograd may have saved the old one.
            self._tensor_exponent = self._controller.sites.global_site.exponent
            self._scale = torch.full_like(self._scale, self._compute_global_scale())
        return self._scale.to(device, non_blocking=True)

    def set_growth_factor(self, new_factor: float) -> None:
        """Refuse: scales are powers of two, which the policy chooses."""
        raise NotImplementedError(
            f"scales are powers of two, which the policy chooses, got {new_factor}: give policy= to the scaler, such "
            "as Dynamic(growth_interval=...)"
        )

    set_backoff_factor = set_growth_factor

    def set_growth_interval(self, new_interval: int) -> None:
        """Refuse, as `set_growth_factor` does."""
        self.set_growth_factor(new_interval)

    # what it tells --------------------------------------------------------------------------------------------

    def sites(self) -> SiteTable:
        """Return every gradient's exponent and its last measurement; ``print`` it for a table."""
        return SiteTable(tuple(map(SiteRow.from_site, self._controller.sites.values())))

    def set_exponents(self, exponents: Mapping[str, int]) -> None:
        """Set sites' exponents by hand, all others to 0, and begin a new iteration: for experiments and proofs.

        Raises:
            ValueError: there is no such site yet (sites are known from the first forward pass on), or an exponent is no
                integer from floor to ceiling.
        """
        self._controller.replace_all_exponents(exponents)
        self._clear_iteration()

    def merge_into_global_site(self, *keys: str, reason: str = "by hand") -> None:
        """Let sites follow the global exponent from now on.

        Raises:
            ValueError: there is no such site; before the first forward pass any key is taken.
        """
        self._controller.sites.merge_into_global_site(keys, reason)

    def backend(self, name: str = "inductor") -> Callable[..., Any]:
        """Return the backend of ``torch.compile(model, backend=scaler.backend("inductor"))`` for this scaler's models.

        Raises:
            ValueError: a backend without a backward graph to put exponents in.
        """
        from ._compiled_backend import make_torch_compile_backend

        # Compiled graphs cannot lift exponents by the loss.
        loss_follower = self._controller.loss_follower
        loss_follower.is_enabled = loss_follower.is_active = False
        return make_torch_compile_backend(self._controller.backward, name)

    # what is saved --------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return GradScaler's entries and each site's exponent and history as plain data; empty where disabled."""
        if not self._enabled:
            return {}
        state = {**super().state_dict(), "scale": self._compute_global_scale()}
        controller = self._controller
        sites = convert_sites_to_plain_data(controller.sites, controller.loss_follower.resume_iteration)
        return {**state, "sites": sites, "progress": controller.progress_counters}

    def __reduce__(self) -> tuple[Any, ...]:
        """Refuse: a copy would belong to no model."""
        raise TypeError(
            "an AdaptiveGradScaler is not pickled or copied, as it belongs to a model: save scaler.state_dict(), make "
            "AdaptiveGradScaler(model) of the copied model, and load it there; keep the scaler beside the model"
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned, and begin its iteration anew: gradients made before are not stepped with.

        Sites are known from the first forward pass on; before it only the modules that they name are compared, and a
        state of then takes all sites back to the start. Policy, floor and ceiling stay this scaler's.

        Raises:
            ValueError: an empty or damaged state, a GradScaler's, or one of another model; nothing is changed.
        """
        if not self._enabled:
            return
        if not state_dict:
            raise ValueError("the state_dict is empty, as a disabled scaler's is: make the scaler with enabled=False")
        controller, given = self._controller, read_site_entries_by_key(state_dict)
        module_names = {name for one in controller.backward.name_caches for name, _ in one.list_modules()}
        module_names |= {"model", "", GLOBAL_SITE_KEY}
        if not state_dict["progress"][0]:
            add_new_sites(given, controller.sites)
        check_saved_sites_match(given, set(controller.sites), module_names)
        taken = {key: state_dict[key] for key in ("scale", "_growth_tracker")}
        super().load_state_dict({**super().state_dict(), **taken})
        controller.load_state(given, state_dict["progress"])
        self._clear_iteration()

    def detach(self) -> None:
        """Restore the models' own forward passes; the scaler cannot be used afterwards."""
        for detach in self._detach_functions:
            detach()
        self._detach_functions.clear()
        self._enabled = False


def list_models(model: nn.Module | Sequence[nn.Module]) -> list[nn.Module]:
    """Return one model or several as a list."""
    models: list[Any] = list(model) if isinstance(model, (list, tuple)) else [model]
    wrong = [name_type(one) for one in models if not isinstance(one, nn.Module)]
    if wrong or not models:
        raise TypeError(
            f"the model is {wrong[0] if wrong else 'an empty list'}: give a torch.nn.Module, or a list of several"
        )
    return models


def _list_parameters_with_gradients(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Yield the parameters of an optimizer that have a gradient."""
    for group in optimizer.param_groups:
        yield from (parameter for parameter in group["params"] if parameter.grad is not None)


def _read_version(gradient: Tensor) -> object:
    """Return what a write into a gradient, or other memory for it, changes; inference tensors count as written."""
    if gradient.is_inference():
        return object()
    has_memory = type(gradient) is Tensor and gradient.layout is torch.strided
    return gradient._version, gradient.data_ptr() if has_memory else 0


def _group_by_device_mesh(parameters: list[Tensor]) -> list[list[Tensor]]:
    """Group parameters by their gradients' device mesh: torch takes no list of plain and sharded ones, or of two."""
    dtensor = sys.modules.get("torch.distributed.tensor")
    # Plain gradients come first: what is found in them is told to other processes by what follows.
    found: dict[Any, list[Tensor]] = {None: []}
    for parameter in parameters:
        is_sharded = dtensor is not None and isinstance(parameter.grad, dtensor.DTensor)
        gradient: Any = parameter.grad
        found.setdefault(gradient.device_mesh if is_sharded else None, []).append(parameter)
    return [alike for alike in found.values() if alike]
