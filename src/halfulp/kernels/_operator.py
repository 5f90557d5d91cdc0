"""torch operators: ours defined so that no compiler removes a rounding, torch's looked up by name, opaque frames."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NoReturn, TypeVar, cast

import torch
from torch._ops import OpOverload
from torch.autograd import forward_ad

from .._messages import ENV_HINT
from .._torch_import import suspend_imports_by_operator_lookup
from .._torch_versions import CUDAGRAPH_UNSAFE_TAG, hide_frames_from_dynamo, make_torch_too_old_error

_operator_library = torch.library.Library("halfulp", "DEF")


def define_operator(
    schema: str, implementation: Callable, fake: Callable, is_random: bool = False, depends_on_host: bool = False
) -> OpOverload:
    """Define `halfulp::<schema>` with one implementation for every device, and return its default overload.

    `fake` is the same call on tensors without data. Where it `is_random` it draws from torch's default generator: no
    compiler merges two calls or repeats one. Where it `depends_on_host`, on what the host knows as it runs, no CUDA
    graph replays it, nor a random one, whose draws begin on the host.
    """
    name = schema.split("(", 1)[0]
    tags = [torch.Tag.pt2_compliant_tag]
    tags += [torch.Tag.nondeterministic_seeded] if is_random else []
    if is_random or depends_on_host:
        tags += [CUDAGRAPH_UNSAFE_TAG] if CUDAGRAPH_UNSAFE_TAG else []
        implementation = implementation if CUDAGRAPH_UNSAFE_TAG else _wrap_to_refuse_cuda_graphs(name, implementation)
    with suspend_imports_by_operator_lookup():
        _operator_library.define(schema, tags=tuple(tags))
    _operator_library.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"halfulp::{name}", fake, lib=_operator_library)
    return getattr(torch.ops.halfulp, name).default


def _wrap_to_refuse_cuda_graphs(name: str, implementation: Callable) -> Callable:
    """Refuse to be captured into a CUDA graph, which would replay what the host decided at the capture."""

    def run(*arguments: Any) -> Any:
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            feature = f"halfulp::{name} must be left out of CUDA graphs, which needs Tag.cudagraph_unsafe"
            raise make_torch_too_old_error(feature, 'compile without mode="reduce-overhead" and "max-autotune"')
        return implementation(*arguments)

    return run


def is_under_transform() -> bool:
    """Return whether a torch.func transform or forward-mode differentiation is active, and no compiler traces.

    There an operator's registered backward rule is no rule: grad refuses it and jvp takes its derivative for 0. An
    autograd.Function with a jvp serves all of them, at a cost that a plain call need not pay.
    """
    if torch.compiler.is_compiling():
        return False
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


_absent_operator_names: set[str] = set()


def find_operator_namespace(namespace: str) -> TorchOperators:
    """Return the operators of a namespace, such as "aten", to be used as torch.ops.aten is.

    >>> aten = find_operator_namespace("aten")
    >>> aten.add.Tensor is torch.ops.aten.add.Tensor, aten.gone_since.default
    (True, <aten::gone_since.default, which torch ... lacks>)
    >>> list_present_operators([aten.neg.default, aten.gone_since.default])
    [<OpOverload(op='aten.neg', overload='default')>]
    """
    return TorchOperators(namespace, getattr(torch.ops, namespace))


def list_present_operators(operators: Iterable[Any]) -> list[Any]:
    """Return those operators that the installed torch has."""
    return [operator for operator in operators if not isinstance(operator, TorchOperators)]


def list_absent_operators() -> list[str]:
    """Return the operators that were looked up by now and that the installed torch lacks."""
    return sorted(_absent_operator_names)


class TorchOperators:
    """A namespace of torch.ops, one of its operators, or an overload that the installed torch lacks.

    Attributes, looked up once, are operators and overloads. What torch lacks cannot be called, and registries skip it.
    """

    def __init__(self, name: str, torch_object: Any) -> None:
        self._name, self._torch_object = name, torch_object

    def __getattr__(self, name: str) -> Any:
        found, is_namespace = getattr(self._torch_object, name, None), "::" not in self._name
        # Such as __wrapped__, though torch has aten.__and__. No overload begins with an underscore: unittest.mock's
        # call asks everything that doctest finds for _mock_name.
        if found is None and name.startswith("__" if is_namespace else "_"):
            raise AttributeError(name)
        if is_namespace:
            found = TorchOperators(f"{self._name}::{name}", found)
        elif found is None:
            _absent_operator_names.add(f"{self._name}.{name}")
            found = TorchOperators(f"{self._name}.{name}", None)
        vars(self)[name] = found
        return found

    def __repr__(self) -> str:
        lacking = f", which torch {torch.__version__} lacks" if self._torch_object is None else ""
        return f"<{self._name}{lacking}>"

    def __call__(self, *arguments: Any, **options: Any) -> NoReturn:
        raise NotImplementedError(
            f"torch {torch.__version__} has no operator {self._name}: install another torch; {ENV_HINT}"
        )

    def overloads(self) -> list[str]:
        """Return the names of the overloads of an operator."""
        if self._torch_object is None:
            _absent_operator_names.add(self._name)
            return []
        return self._torch_object.overloads()


FunctionType = TypeVar("FunctionType", bound=Callable)


def hide_own_frames_from_compiler(function: FunctionType) -> FunctionType:
    """Let torch.compile never capture a function's own frames, as a decorator that costs a call nothing.

    Between the graphs of a compiled function, frames that torch itself enters (`__torch_dispatch__`, rules, hooks of
    autograd) look like the user's, and would be captured like those: with tensors in them that are only half made. What
    a graph calls is traced as ever. torch.compiler.disable does this at 2 us a call, and imports the compiler.

    >>> hide_own_frames_from_compiler(len.__call__) is len
    Traceback (most recent call last):
        ...
    TypeError: hide_own_frames_from_compiler takes a Python function, got method-wrapper
    """
    if not hasattr(function, "__code__"):
        raise TypeError(f"hide_own_frames_from_compiler takes a Python function, got {type(function).__name__}")
    return cast(FunctionType, hide_frames_from_dynamo(function))


def break_graph_and_run_eagerly(function: FunctionType) -> FunctionType:
    """Let torch.compile run a function eagerly, breaking its graph there: torch.compiler.disable without a wrapper."""
    marked: Any = hide_own_frames_from_compiler(function)
    marked._torchdynamo_disable = True
    marked._torchdynamo_disable_msg = f"{function.__qualname__} of halfulp runs uncompiled"
    return cast(FunctionType, marked)


def assume_constant_result(function: FunctionType) -> FunctionType:
    """torch.compiler.assume_constant_result, without the import of the compiler."""
    vars(function)["_dynamo_marked_constant"] = True
    return function
