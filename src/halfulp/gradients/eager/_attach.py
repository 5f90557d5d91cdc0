"""Attaching a scaler to a model: its forward pass runs in a region from then on."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..._messages import a_kind
from ...mctensor import MCTensor
from ...scaled import ScaledTensor
from ...subclass.models._float32_products import class_of, leave_compiled_products
from ..replay._replay import Replay, Replays
from ._backward import Backward, differentiating
from ._current_region import current
from ._custom_functions import watched
from ._forward import Forward, traced
from ._module_mode import attach_modules
from ._region import Region

Role = Literal["model", "part", "layer"]


class WatchedForward(Forward):
    """The ``forward`` of a model or of a part, which runs in a region whenever gradients are recorded.

    Args:
        module: the model, or one of its modules.
        backward: what its edges belong to.
        wide: whether float16 that leaves a region becomes float32; None: under autocast to float16.
        names: of the model's parameters.
        place: what runs in the module is named after it.
        role: "model"; "part", a module with parts, or "layer", one without, which make regions where they are called
            by themselves, as by a training step that does not call the model.
    """

    def __init__(
        self, module: nn.Module, backward: Backward, wide: bool | None, names: ParameterNames, place: str, role: Role
    ) -> None:
        super().__init__(module, backward)
        self._wide = wide
        self._names = names
        self._place = place
        self._role = role
        self._replays = Replays(backward, names)

    def _with_edges(self, args: tuple, kwargs: dict) -> Any:
        region = current()
        if region is None and traced():
            return self.inner(*args, **kwargs)
        if region is None and differentiating():
            # What a checkpoint runs again has its edges already, or is differentiated where all are shut.
            self._backward.forwards += 1
            return self.inner(*args, **kwargs)
        if region is None or self._role == "model":
            self._backward.join()
        if region is None and self._replays.ready():
            with Replay(self._backward, self._replays) as replay:
                return replay.run(self.inner, args, kwargs, self._widens)
        if region is None:
            return self._in_region(args, kwargs)
        if self._role != "part" or region.replaying:
            return self.inner(*args, **kwargs)
        depth = len(region.path)
        region.path.append(self._place)
        try:
            return self.inner(*args, **kwargs)
        finally:
            # Names left by parts that raised go, too.
            del region.path[depth:]

    def _in_region(self, args: tuple, kwargs: dict) -> Any:
        with watched(self._backward), Region(self._backward, self._names) as region:
            region.path = [self._place] if self._place else []
            region.recording = recording = self._replays.recording()
            region.take((args, kwargs))
            out = self.inner(*args, **kwargs)
            if recording is not None:
                region.recording = None
                self._replays.learn(recording, (args, kwargs), out, region.begun)
            return region.leave(out, self._widens())

    def _marked(self, out: Any) -> Any:
        return super()._marked(out) if self._role == "model" else out

    def _widens(self) -> bool:
        return under_float16() if self._wide is None else self._wide


def under_float16() -> bool:
    """Whether autocast to float16 is on, for any kind of device."""
    kinds = ("cpu", "cuda", "mps", "xpu")
    return any(torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.float16 for kind in kinds)


class ParameterNames:
    """A cached map from parameters to the modules that hold them, looked up again for an unknown parameter.

    Attributes:
        lookups: how often that was.
    """

    def __init__(self, model: nn.Module, prefix: str) -> None:
        self._model = weakref.ref(model)
        self._prefix = f"{prefix}." if prefix else ""
        self._names: dict[int, str | None] = {}
        self.lookups = 0

    def of(self, parameter: Tensor) -> str | None:
        """Qualified name of the module that holds it; None where the model does not list it."""
        if id(parameter) not in self._names:
            self.lookups += 1
            model = self._model()
            listed = () if model is None else model.named_parameters()
            self._names |= {id(p): (self._prefix + name).rpartition(".")[0] or "model" for name, p in listed}
            self._names.setdefault(id(parameter), None)
        return self._names[id(parameter)]

    def parameters(self) -> Iterator[nn.Parameter]:
        """All parameters of the model, if that is still there."""
        model = self._model()
        return iter(()) if model is None else model.parameters()

    def parts(self) -> dict[int, str]:
        """The names of the modules that have parts, by their ids: what runs in one is named after it."""
        model = self._model()
        modules = () if model is None else model.named_modules()
        parts = ((name, one) for name, one in modules if next(one.children(), None) is not None)
        return {id(one): (self._prefix + name).strip(".") for name, one in parts}

    def sharded(self) -> bool:
        """Whether parts of the model belong to FSDP, which computes with copies of its parameters."""
        from torch.distributed.fsdp import FSDPModule

        model = self._model()
        return model is not None and any(isinstance(module, FSDPModule) for module in model.modules())


def parts_of(model: nn.Module) -> Iterator[tuple[str, nn.Module, Role]]:
    """The modules that a step may call by themselves, each with the place after which what runs there is named.

    These are those with parts of their own, and layers that the model holds itself; `nn.Sequential` calls its layers.
    """
    for name, module in model.named_modules():
        home = name.rpartition(".")[0]
        while home and _calls_nothing(model.get_submodule(home)):
            home = home.rpartition(".")[0]
        if not name or _calls_nothing(module):
            continue
        if next(module.children(), None) is not None:
            yield name, module, "part"
        elif not home and class_of(model) is not nn.Sequential and next(module.parameters(), None) is not None:
            yield home, module, "layer"


def _calls_nothing(module: nn.Module) -> bool:
    """Return whether a module has no forward of its own, such as `nn.ModuleList`."""
    return type(module).forward is nn.Module.forward


def attach(model: nn.Module, backward: Backward, *, wide: bool | None, prefix: str, mode: str) -> Callable[[], None]:
    """Attach a scaler's edges to a model; returns a function that detaches them.

    Args:
        model: the module, or torch's data-parallel wrapper of it.
        backward: what its edges belong to.
        wide: whether its float16 outputs become float32; None: under autocast to float16.
        prefix: what its sites' keys begin with.
        mode: "function": its forward passes run in regions; "module": its modules are sites.

    Raises:
        TypeError: no module.
        ValueError: it is compiled, wrapped by another scaler, or holds tensors with scales or components of their own.
    """
    wrapper, model = model, unwrapped(model)
    check(model)
    # A compiled forward pass does not tell who called it.
    backward.processes.watch(wrapper)
    names = ParameterNames(model, prefix)
    backward.names.add(names)
    # The backend of a compiler finds sites by the products that the model writes.
    leave_compiled_products(model)
    if mode == "module":
        remove = attach_modules(model, backward, prefix, names)
    else:
        remove = _attach_function(model, backward, wide, prefix, names)

    def detach() -> None:
        leave_compiled_products(model, False)
        remove()

    return detach


def _attach_function(
    model: nn.Module, backward: Backward, wide: bool | None, prefix: str, names: ParameterNames
) -> Callable[[], None]:
    """Let the forward passes of a model and of its parts run in regions; return a function that restores them."""
    forwards = [WatchedForward(model, backward, wide, names, prefix, "model")]
    for place, part, role in parts_of(model):
        place = ".".join(filter(None, (prefix, place)))
        forwards.append(WatchedForward(part, backward, wide, names, place, role))
    for forward in forwards:
        forward.put()

    def restore() -> None:
        for forward in forwards:
            forward.restore()

    return restore


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside torch's data-parallel wrappers."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"the model is {a_kind(model)}: give a torch.nn.Module")
    if isinstance(model, nn.DataParallel):
        raise ValueError("DataParallel runs copies of the model in threads: use DistributedDataParallel")
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


def _is_compiled(module: nn.Module) -> bool:
    # Whoever compiled a module has loaded dynamo, which importing this file should not.
    dynamo = sys.modules.get("torch._dynamo")
    wrapped = dynamo is not None and isinstance(module, dynamo.OptimizedModule)
    return wrapped or getattr(module, "_compiled_call_impl", None) is not None


def _watched(module: nn.Module) -> bool:
    return isinstance(module.__dict__.get("forward"), Forward)


def check(model: nn.Module) -> None:
    """Refuse models whose backward pass cannot be watched."""
    if any(_watched(module) for module in model.modules()):
        raise ValueError(
            "the model has an AdaptiveGradScaler already, and two would scale twice: use that one, or call its "
            "detach() before"
        )
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(
                f"{'the model' if not name else repr(name)} is a script module, which takes no hooks and shows no "
                "functions: give the plain Python module"
            )
        if _is_compiled(module):
            raise ValueError(
                f"{'the model' if not name else repr(name)} is compiled, and its backward pass would keep one exponent "
                "in silence: give the plain model to AdaptiveGradScaler and compile it afterwards with "
                'torch.compile(model, backend=scaler.backend("inductor"))'
            )
    for name, parameter in model.named_parameters():
        if isinstance(parameter, (ScaledTensor, MCTensor)):
            raise ValueError(
                f"parameter {name!r} is {a_kind(parameter)}, whose gradients have scales or components of "
                "their own: AdaptiveGradScaler takes a model of plain tensors"
            )
