"""Attaching a scaler to a model, whose forward passes run in regions from then on."""

from __future__ import annotations

import copy
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..._messages import name_type
from ..._torch_versions import is_exporting
from ...kernels import define_operator
from ...mctensor import MCTensor
from ...scaled import ScaledTensor
from ...subclass.models._float32_products import (
    ForwardTracedByCompiler,
    get_original_class,
    leave_compiled_products_to_torch,
)
from .._functions import map_tensors
from ._backward import BackwardHooks, is_in_backward_pass, thread_region_state
from ._region import CallRecording, ModuleNameCache, Region, is_inside_compiled_call, refuse_compiled_part
from ._replay import GraphReplay


def _refuse_other_compile_backend(out: Tensor, scaler: str) -> Tensor:
    raise ValueError(
        "the model has an AdaptiveGradScaler but was compiled by another backend, which would keep all its gradients "
        'at one exponent in silence: compile it with torch.compile(model, backend=scaler.backend("inductor")), of the '
        "same scaler"
    )


mark_scaled_output = define_operator(
    "mark_scaled_output(Tensor out, str scaler) -> Tensor",
    _refuse_other_compile_backend,
    lambda out, scaler: torch.empty_like(out),
)
# Traced by other backends on the way to its refusal.
torch.library.register_autograd("halfulp::mark_scaled_output", lambda _, gradient: (gradient, None))


class NotScriptedError(NotImplementedError, AttributeError):
    """Raised to torch.jit.script for an attribute that it needs; to others the attribute is missing."""


ModuleRole = Literal["model", "part", "layer"]


class WatchedForward(ForwardTracedByCompiler):
    """The ``forward`` of a model or of a part, which runs in a region whenever gradients are recorded.

    Parts and layers make regions where they are called by themselves, as by a training step that does not call the
    model. Copies of the module get its own forward back.
    """

    def __init__(
        self,
        module: nn.Module,
        backward: BackwardHooks,
        widens_output: bool | None,
        names: ModuleNameCache,
        module_name: str,
        role: ModuleRole,
    ) -> None:
        self._module = weakref.ref(module)
        self._backward = backward
        self._previous_forward = module.__dict__.get("forward")
        # Callers look at the signature, to know which columns of a data set a model takes, and at the source.
        self.inner = self.__wrapped__ = module.forward
        module.forward = self
        # Whether float16 that leaves a region becomes float32; None: under autocast to float16.
        self._widens_output = widens_output
        self._names = names
        # What runs in the module is named after it.
        self._module_name = module_name
        self._role = role
        self._replay = GraphReplay(backward, names)

    @property
    def __code__(self) -> types.CodeType:
        """The plain forward pass's, which torch.export reads."""
        return self.inner.__code__

    @property
    def __globals__(self) -> dict[str, Any]:
        """Raise: torch.jit.script reads this first, and would compile the source of this class."""
        raise NotScriptedError(
            "torch.jit.script cannot compile a model that has an AdaptiveGradScaler: give it a copy, which has none, "
            "torch.jit.script(copy.deepcopy(model)), or call scaler.detach() before"
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward pass; without edges where autograd does not differentiate it."""
        if not torch.is_grad_enabled() or self._backward.is_idle:
            return self.inner(*args, **kwargs)
        if torch.compiler.is_compiling():
            # One expression: where a graph breaks in it, Dynamo goes on inside of the module.
            return (
                self.inner(*args, **kwargs)
                if is_exporting()
                else self._mark_compiled_outputs(self.inner(*args, **kwargs))
            )
        if is_inside_compiled_call():
            # Dynamo has given this call up, and would compile parts of it.
            if thread_region_state.region is not None:
                refuse_compiled_part()
            return torch.compiler.disable(self._run_in_region_or_replay)(args, kwargs)
        return self._run_in_region_or_replay(args, kwargs)

    def _mark_compiled_outputs(self, out: Any) -> Any:
        """Mark the model's outputs in a compiled graph for the scaler's backend."""
        if self._role != "model":
            return out
        handle, wide = self._backward.handle, self._is_output_widened_to_float32()
        return map_tensors(
            out, lambda x: mark_scaled_output(x.float() if wide and x.dtype == torch.float16 else x, handle)
        )

    @property
    def __func__(self) -> Callable[..., Any]:
        """The function of a module that this is bound to, as a method's: accelerate wraps it and binds it anew."""

        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            watched = module is self._module()
            return self(*args, **kwargs) if watched else get_plain_forward(module)(*args, **kwargs)

        return forward

    def _run_in_region_or_replay(self, args: tuple, kwargs: dict) -> Any:
        """Run the forward pass in the region around it, in one of its own, or as a replay."""
        region = thread_region_state.region
        if region is None and (torch._C._are_functorch_transforms_active() or torch.jit.is_tracing()):
            return self.inner(*args, **kwargs)
        if region is None and is_in_backward_pass():
            # What a checkpoint runs again has its edges already, or is differentiated where all are shut.
            self._backward.forward_count += 1
            return self.inner(*args, **kwargs)
        is_first = not self._backward.reached_sites and not self._backward.forward_count
        if is_first and (region is None or self._role == "model"):
            self._backward.update_process_groups()
        if region is None:
            replay = self._replay if self._backward.is_replay_allowed() else None
            if replay is None or not replay.is_ready_to_replay():
                return self._run_in_region(args, kwargs, replay)
            return replay.run_forward(self.inner, args, kwargs, self._is_output_widened_to_float32)
        if self._role != "part" or region.is_replaying:
            return self.inner(*args, **kwargs)
        depth = len(region.path)
        region.path.append(self._module_name)
        try:
            return self.inner(*args, **kwargs)
        finally:
            # Names left by parts that raised go, too.
            del region.path[depth:]

    def _run_in_region(self, args: tuple, kwargs: dict, replay: GraphReplay | None) -> Any:
        """Run the forward pass in a region, from which ``replay`` learns if it is given."""
        if replay is not None and not replay.can_learn():
            replay = None
        with Region(self._backward, self._names, learns=replay is not None) as region:
            region.path = [self._module_name] if self._module_name else []
            region.mark_arguments_at_global_exponent((args, kwargs))
            out = self.inner(*args, **kwargs)
            # What a checkpoint keeps of this region must not hold the graph, which holds the checkpoint.
            recording, region.recording = region.recording, CallRecording(learns=False)
            if replay is not None:
                replay.learn_from_recording(recording, (args, kwargs), out, region.start_sequence_nr)
            return region.move_output_to_global_exponent(out, self._is_output_widened_to_float32())

    def _is_output_widened_to_float32(self) -> bool:
        if self._widens_output is not None:
            return self._widens_output
        devices = ("cpu", "cuda", "mps", "xpu")
        return any(torch.is_autocast_enabled(d) and torch.get_autocast_dtype(d) == torch.float16 for d in devices)

    def restore_previous_forward(self) -> None:
        """Restore the module's previous forward."""
        module = self._module()
        if module is not None:
            module.__dict__.pop("forward", None)
            if self._previous_forward is not None:
                module.forward = self._previous_forward

    def __deepcopy__(self, memo: dict) -> Callable:
        previous = self._previous_forward
        return get_plain_forward(memo[id(self._module())]) if previous is None else copy.deepcopy(previous, memo)

    def __reduce__(self) -> tuple:
        return get_plain_forward, (self._module(),)


def get_plain_forward(module: nn.Module) -> types.MethodType:
    """Return the ``forward`` of a module's class."""
    return types.MethodType(type(module).forward, module)


def list_watched_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module, ModuleRole]]:
    """Yield the model, its modules with parts, and layers that it holds itself, each with the name before its sites."""
    yield "", model, "model"
    # `nn.Sequential` calls its layers.
    holds_layers = get_original_class(model) is not nn.Sequential
    for name, module in model.named_modules():
        home = name.rpartition(".")[0]
        while home and _has_no_forward(model.get_submodule(home)):
            home = home.rpartition(".")[0]
        if not name or _has_no_forward(module):
            continue
        if next(module.children(), None) is not None:
            yield name, module, "part"
        elif holds_layers and not home and next(module.parameters(), None) is not None:
            yield home, module, "layer"


def _has_no_forward(module: nn.Module) -> bool:
    """Return whether a module has no forward of its own, such as `nn.ModuleList`."""
    return type(module).forward is nn.Module.forward


def attach_scaler(model: nn.Module, backward: BackwardHooks, *, wide: bool | None, prefix: str) -> Callable[[], None]:
    """Attach a scaler's edges to a model; returns a function that detaches them."""
    if isinstance(model, nn.DataParallel):
        raise ValueError("DataParallel runs copies of the model in threads: use DistributedDataParallel")
    model = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    refuse_unwatchable_model(model)
    names = ModuleNameCache(model, prefix)
    backward.name_caches.add(names)
    # The backend of a compiler finds sites by the products that the model writes.
    leave_compiled_products_to_torch(model)
    forwards = [
        WatchedForward(part, backward, wide, names, ".".join(filter(None, (prefix, place))), role)
        for place, part, role in list_watched_modules(model)
    ]

    def detach() -> None:
        leave_compiled_products_to_torch(model, False)
        for forward in forwards:
            forward.restore_previous_forward()

    return detach


def refuse_unwatchable_model(model: nn.Module) -> None:
    """Refuse models whose backward pass cannot be watched."""
    if any(isinstance(vars(module).get("forward"), WatchedForward) for module in model.modules()):
        raise ValueError(
            "the model has an AdaptiveGradScaler already, and two would scale twice: use that one, or call its "
            "detach() before"
        )
    # Whoever compiled a module has loaded dynamo, which importing this file should not.
    dynamo = sys.modules.get("torch._dynamo")
    for name, module in model.named_modules():
        said = repr(name) if name else "the model"
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(
                f"{said} is a script module, which takes no hooks and shows no functions: give the plain Python module"
            )
        wrapped = dynamo is not None and isinstance(module, dynamo.OptimizedModule)
        if wrapped or getattr(module, "_compiled_call_impl", None) is not None:
            raise ValueError(
                f"{said} is compiled, and its backward pass would keep one exponent "
                "in silence: give the plain model to AdaptiveGradScaler and compile it afterwards with "
                'torch.compile(model, backend=scaler.backend("inductor"))'
            )
    for name, parameter in model.named_parameters():
        if isinstance(parameter, (ScaledTensor, MCTensor)):
            raise ValueError(
                f"parameter {name!r} is {name_type(parameter)}, whose gradients have scales or components of "
                "their own: AdaptiveGradScaler takes a model of plain tensors"
            )
