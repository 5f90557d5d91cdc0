"""Replacing a model's parameters by tensors of another class, and back, with the modules that hold them."""

from __future__ import annotations

import difflib
import fnmatch
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..._messages import ENV_HINT, name_type
from ...kernels import hide_own_frames_from_compiler
from .. import _rule_table
from .._in_backward import refuse_jit_trace_of_model
from . import _state_dict
from ._parameter_holders import check_parameter_holders, install_registration_hooks


def remove_forward_hooks(modules: Iterable[nn.Module], is_ours: Callable[[Any], bool]) -> None:
    """Remove the forward hooks and pre-hooks of modules that a predicate picks, with what torch notes of them."""
    for module in modules:
        tables: list[tuple[dict[int, Any], ...]] = [
            (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs),
            (module._forward_hooks, module._forward_hooks_with_kwargs, module._forward_hooks_always_called),
        ]
        for hooks, *notes in tables:
            for key in [key for key, hook in hooks.items() if is_ours(hook)]:
                for table in (hooks, *notes):
                    table.pop(key, None)


ParameterSelector = str | Iterable[str] | Callable[[nn.Module, str], bool] | None


class ParameterRef(NamedTuple):
    """A parameter or buffer with its qualified name, the module that holds it, and its name there."""

    name: str
    module: nn.Module
    attribute_name: str
    value: Tensor

    @property
    def is_parameter(self) -> bool:
        return self.attribute_name in self.module._parameters

    def replace_in_module(self, value: Tensor) -> None:
        """Replace the parameter in its module, by attribute, as recurrent modules keep lists of their weights."""
        setattr(self.module, self.attribute_name, value)


def check_is_module(given: object, what: str) -> None:
    """Raise TypeError where something else than a module was given to the function named `what`."""
    if not isinstance(given, nn.Module):
        raise TypeError(f"{what} takes a torch.nn.Module, got {name_type(given)}")


def list_module_parameters(model: nn.Module, constants: bool = False) -> Iterator[ParameterRef]:
    """Yield every parameter under each of its names; with `constants` floating buffers that are not saved, too."""
    for path, module in model.named_modules():
        values = dict(module._parameters)
        if constants:
            buffers = {key: module._buffers.get(key) for key in module._non_persistent_buffers_set}
            values |= {key: value for key, value in buffers.items() if value is not None and value.is_floating_point()}
        for key, value in values.items():
            if value is not None:
                yield ParameterRef(f"{path}.{key}" if path else key, module, key, value)


def list_matching_parameters(found: Iterable[ParameterRef], where: ParameterSelector) -> list[ParameterRef]:
    """Return the parameters that match under any of their names, each under all of its names."""
    # `where` is a glob, several, a function of a module and a name, or None for all.
    found = list(found)
    if where is None:
        return found
    globs: list[Any] = [where] if isinstance(where, str) or callable(where) else list(where)
    names = [ref.name for ref in found]
    for glob in () if callable(where) else globs:
        if not isinstance(glob, str):
            raise TypeError(f"where holds {glob!r}: allowed are globs over names, or one function f(module, name)")
        if not fnmatch.filter(names, glob):
            near = difflib.get_close_matches(glob, names, n=3, cutoff=0.4)
            hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"the names are {names[:5]} ..."
            raise ValueError(f"where={glob!r} matches no parameter; {hint}")

    def matches(ref: ParameterRef) -> bool:
        if callable(where):
            return where(ref.module, ref.name)
        return any(fnmatch.fnmatchcase(ref.name, glob) for glob in globs)

    matched = {id(ref.value) for ref in found if matches(ref)}
    if not matched:
        raise ValueError(f"where={where!r} matches none of the model's {len(found)} parameters")
    return [ref for ref in found if id(ref.value) in matched]


def refuse_torchscript(ref: ParameterRef) -> None:
    """Raise for a parameter of a module of torch.jit, which takes neither hooks nor tensors of another kind."""
    if isinstance(ref.module, torch.jit.ScriptModule):
        raise ValueError(
            f"parameter {ref.name!r} is of {name_type(ref.module)}, which runs its graph as recorded: convert the "
            "model before torch.jit.script or torch.jit.trace"
        )


def check_module_takes_conversion(ref: ParameterRef) -> None:
    """Raise for a parameter of a module of torch.jit, of one with sparse gradients, or of a lazy one before a batch."""
    refuse_torchscript(ref)
    if isinstance(ref.module, (nn.Embedding, nn.EmbeddingBag)) and ref.module.sparse and ref.value.requires_grad:
        raise ValueError(
            f"parameter {ref.name!r} is of {name_type(ref.module)} with sparse=True, whose gradients have neither "
            "components nor a scale: make it with sparse=False, or leave it out by where="
        )
    if nn.parameter.is_lazy(ref.value):
        raise ValueError(f"parameter {ref.name!r} has no shape yet: run one batch through the model first")


def copy_attributes(new: nn.Parameter, old: Tensor) -> nn.Parameter:
    """Copy the attributes that users set on a parameter (marks for weight decay, say), but for its class's own."""
    own = {*getattr(old, "_value_attributes", ()), "_is_param", _state_dict.FIRST_SAVED_NAME_ATTRIBUTE}
    new.__dict__.update({name: value for name, value in old.__dict__.items() if name not in own})
    return new


FunctionWrapper = Callable[[Callable[..., Any]], Callable[..., Any]]
_CHECKPOINT_ADVICE = "checkpoint the whole model instead, or run it without checkpointing"


def wrap_recomputed_function(pack: Callable[..., Any], wrap: FunctionWrapper, what: str) -> None:
    """Wrap, once, the function that torch.utils.checkpoint(use_reentrant=False) recomputes."""
    # Its frame is reached through the hook that packs saved tensors while the checkpointed function runs; other hooks
    # are left alone.
    if getattr(pack, "__module__", "") != "torch.utils.checkpoint" or "_recomputation_hook" in pack.__qualname__:
        return
    cells = dict(zip(pack.__code__.co_freevars, pack.__closure__ or ()))
    frame = cells["frame"].cell_contents if "frame" in cells else None
    if frame is None or not callable(getattr(frame, "recompute_fn", None)):
        raise NotImplementedError(
            f"{what} does not know the activation checkpointing of torch {torch.__version__}: {_CHECKPOINT_ADVICE}; "
            f"{ENV_HINT}"
        )
    if getattr(frame.recompute_fn, "_wrapped_by", None) is wrap:
        return
    frame.recompute_fn = wrap(frame.recompute_fn)
    frame.recompute_fn._wrapped_by = wrap


def wrap_reentrant_recomputed_function(node: Any, name: str, wrap: FunctionWrapper, what: str) -> None:
    """Wrap the function that reentrant checkpointing (torch.utils.checkpoint) recomputes in the backward pass."""
    if name.endswith("CheckpointFunctionBackward"):
        if not callable(getattr(node, "run_function", None)):
            raise NotImplementedError(
                f"{what} does not know the checkpointing of {name}: {_CHECKPOINT_ADVICE}; {ENV_HINT}"
            )
        node.run_function = wrap(node.run_function)


_FALLBACK_COUNTS_ATTRIBUTE = "_halfulp_fallbacks"


def fallbacks(model: nn.Module | None = None) -> dict[str, int]:
    """Return how often operators without a rule ran on plain tensors: in float64, or in float32 for scaled ones.

    Args:
        model: one that `multicomponent` or `scalify` changed, or that holds such a model: counted since then, in its
            forward passes and in whatever follows one until another such model runs forward: its backward pass, the
            optimizer's step. None counts the whole process.

    Raises:
        ValueError: nothing is counted for this model.

    >>> import torch
    >>> from halfulp.mctensor._convert_model import multicomponent
    >>> fallbacks(multicomponent(torch.nn.Linear(2, 2)))
    {}
    """
    if model is None:
        return dict(_rule_table.fallback_totals)
    check_is_module(model, "fallbacks")
    counts = [
        vars(module)[_FALLBACK_COUNTS_ATTRIBUTE]
        for module in model.modules()
        if _FALLBACK_COUNTS_ATTRIBUTE in vars(module)
    ]
    if not counts:
        raise ValueError(
            f"this {type(model).__name__} has neither multi-component nor scaled parameters: hu.multicomponent(model) "
            "or hu.scalify(model)"
        )
    return dict(sum(counts, Counter()))


@hide_own_frames_from_compiler
def _attribute_fallbacks_to_model(module: nn.Module, arguments: Any) -> None:
    """Attribute the following fallbacks to this model, and refuse recorders: a forward pre-hook."""
    if not torch.compiler.is_compiling():
        refuse_jit_trace_of_model(module)
    _rule_table.running_model_fallbacks.counts = module.__dict__[_FALLBACK_COUNTS_ATTRIBUTE]


def decode_parameter(ref: ParameterRef, dtype: torch.dtype | None) -> Tensor:
    """Return a parameter or buffer of a subclass as a plain one, its gradient too, each value rounded once."""
    old: Any = ref.value
    value: Tensor = old.detach().decode(dtype)
    if not value.is_meta and bool((value.isinf() & old.detach().decode(torch.float64).isfinite()).any()):
        raise ValueError(f"parameter {ref.name!r} has values beyond {value.dtype}: give a wider dtype=")
    if not ref.is_parameter:
        return value
    new = nn.Parameter(value, old.requires_grad)
    if old.grad is not None:
        grad = old.grad.detach()
        new.grad = grad.decode(value.dtype) if hasattr(grad, "decode") else grad.to(value.dtype)
    return copy_attributes(new, old)


def replace_parameters(
    model: nn.Module, refs: Sequence[ParameterRef], convert: Callable[[ParameterRef], Tensor], what: str, *, plain: bool
) -> None:
    """Put converted tensors in the parameters' places, with what a model of such tensors needs; or `plain` ones."""
    # A shared parameter is converted once. Nothing is changed where a parameter is refused.
    check_parameter_holders([(ref.name, ref.value) for ref in refs if ref.is_parameter], what, replaced=True)
    values: dict[int, Tensor] = {}
    for ref in refs:
        if id(ref.value) not in values:
            values[id(ref.value)] = convert(ref)
    for ref in refs:
        ref.replace_in_module(values[id(ref.value)])
        if not plain:
            _state_dict.install_state_dict_hooks(ref.module)
    if plain:
        for module in model.modules():
            _state_dict.remove_state_dict_hooks(module)
            vars(module).pop(_FALLBACK_COUNTS_ATTRIBUTE, None)
        remove_forward_hooks(model.modules(), lambda hook: hook is _attribute_fallbacks_to_model)
        return
    _state_dict.install_state_dict_check(model)
    if _FALLBACK_COUNTS_ATTRIBUTE not in vars(model):
        vars(model)[_FALLBACK_COUNTS_ATTRIBUTE] = Counter()
        model.register_forward_pre_hook(_attribute_fallbacks_to_model)
    install_registration_hooks()
