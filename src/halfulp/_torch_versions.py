"""Names that only newer versions of torch have, each looked up once, with what an older version loses."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from . import _needs_torch  # noqa: F401
from ._messages import ENV_HINT

_torch_C: Any = torch._C
_eval_frame, _torch_autograd = _torch_C._dynamo.eval_frame, _torch_C._autograd
_distributed: Any = torch.distributed  # without its functions in a build without the package
# torch.compile's own check of tensors, which is native: in Python it takes 0.5 us for a parameter and its gradient.
# Without it every step of an optimizer looks at its parameters one by one.
TensorGuards: Any = getattr(getattr(_torch_C._dynamo, "guards", None), "TensorGuards", None)


def make_torch_too_old_error(feature: str, remedy: str) -> NotImplementedError:
    """Return the refusal of a feature that the installed torch cannot give.

    >>> print(make_torch_too_old_error("hu.float32_gradients needs Tensor.grad_dtype", "keep float32 parameters"))
    torch ... lacks it: hu.float32_gradients needs Tensor.grad_dtype; install a newer torch, or keep float32 parameters;
    `halfulp env` prints what there is, and what a report needs
    """
    return NotImplementedError(
        f"torch {torch.__version__} lacks it: {feature}; install a newer torch, or {remedy}; {ENV_HINT}"
    )


# Older: nothing is lost but about 1 us a call, as a wrapper switches Dynamo off while the function runs.
if hasattr(_eval_frame, "_FrameExecStrategy"):

    def hide_frames_from_dynamo(function: Callable) -> Callable:
        """Let Dynamo capture neither a function's frames nor those of what it calls; the function is returned."""
        skip = _eval_frame._FrameAction.SKIP
        _eval_frame.set_code_exec_strategy(function.__code__, _eval_frame._FrameExecStrategy(skip, skip))
        return function

else:

    def hide_frames_from_dynamo(function: Callable) -> Callable:
        """Return a function whose frames, and those of what it calls, Dynamo does not capture."""

        @functools.wraps(function)
        def run(*arguments: Any, **options: Any) -> Any:
            if torch.compiler.is_dynamo_compiling():
                return function(*arguments, **options)
            callback = _eval_frame.set_eval_frame(None)
            try:
                return function(*arguments, **options)
            finally:
                _eval_frame.set_eval_frame(callback)

        skipped: Any = run
        _eval_frame.skip_code(skipped.__code__)
        return run


# Older: an operator that the host decides about refuses to be captured into a CUDA graph, where it would be left out.
CUDAGRAPH_UNSAFE_TAG: torch.Tag | None = getattr(torch.Tag, "cudagraph_unsafe", None)

# Older: hu.float32_gradients refuses.
HAS_GRADIENT_DTYPE = hasattr(torch.Tensor, "grad_dtype")

# Older: torch.compile breaks its graph at an emulated model for a reason in torch's words.
HAS_GRAPH_BREAK_REASON_ARGUMENT = hasattr(
    _eval_frame, "_FrameExecStrategy"
)  # of the same version as graph_break's argument

# Older: a parameter sharded along one dimension twice (_StridedShard) is refused, whose map would ask other ranks.
HAS_SRC_DATA_RANK_ARGUMENT = hasattr(_torch_autograd, "_top_saved_tensors_default_hooks")  # of the same version


# Nothing is lost: older names of the same functions, which newer versions warn of.
_HAS_ALL_GATHER_SINGLE = hasattr(_distributed, "all_gather_single")
ALL_GATHER_FUNCTION: Any = getattr(
    _distributed, "all_gather_single" if _HAS_ALL_GATHER_SINGLE else "all_gather_into_tensor", None
)


def find_torch_dtype(name: str) -> torch.dtype | None:
    """Return torch's dtype of a name. Older: float8_e8m0fnu and float4_e2m1fn_x2 are no dtypes, so no tensor has them.

    >>> find_torch_dtype("float16"), find_torch_dtype("float17")
    (torch.float16, None)
    """
    found = getattr(torch, name, None)
    return found if isinstance(found, torch.dtype) else None


# torch.compiler.is_exporting of torch 2.7 to 2.11 says yes in every graph that Dynamo traces, and 2.6 has none.
# Older: nothing is lost; the flag of torch.export has another name.
_compiler: Any = torch.compiler
_HAS_EXPORTING_FLAG = hasattr(_compiler, "_is_exporting_flag")


def is_exporting() -> bool:
    """Return whether torch.export records what runs."""
    is_recorded = _compiler._is_exporting_flag if _HAS_EXPORTING_FLAG else _compiler._is_compiling_flag
    return is_recorded or (_compiler.is_dynamo_compiling() and _is_traced_for_export())


def _is_traced_for_export() -> bool:
    from torch._dynamo.symbolic_convert import InstructionTranslator

    return InstructionTranslator.current_tx().export


vars(_is_traced_for_export)["_dynamo_marked_constant"] = True  # Dynamo calls it as it traces


# Older: one setting for all backends; products that it might narrow take float64, on every device.
_HAS_PRECISION_PER_BACKEND = hasattr(torch.backends.mkldnn, "matmul")


def has_full_precision_float32_products(device_type: str) -> bool:
    """Return whether torch multiplies float32 matrices in float32, not in TensorFloat32 or bfloat16."""
    if not _HAS_PRECISION_PER_BACKEND:
        return torch.get_float32_matmul_precision() == "highest"
    # torch.get_float32_matmul_precision raises where the backends' settings differ from one another.
    backend = torch.backends.cuda if device_type == "cuda" else torch.backends.mkldnn
    return backend.matmul.fp32_precision in ("none", "ieee")


# Older: nothing is lost; the factors that a solution keeps are the transpose's, as those of a determinant are.
@functools.cache
def has_transposed_factors_in_solve_backward() -> bool:
    """Return whether torch.linalg.solve's backward pass takes the factors of a contiguous matrix's transpose."""
    with _disable_current_modes():
        matrix = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float32, device="cpu")
        factors = torch.ops.aten._linalg_solve_ex.default(matrix, matrix)[1]
        return factors[0, 0].item() == 2  # the largest of the first row, not of the first column


# Older: nothing is lost; the partitioner's tag says which nodes of a joint graph are the backward pass's.
_HAS_BACKWARD_NODE_MARKS = hasattr(torch.fx.traceback, "_mark_autograd_backward")


def is_backward(node: torch.fx.Node) -> bool:
    """Return whether a node of a joint graph is the backward pass's."""
    if _HAS_BACKWARD_NODE_MARKS:
        return bool(node.meta.get("autograd_backward"))
    return node.meta.get("partitioner_tag") == "is_backward"


# Older: nothing is lost; the name of where Dynamo found a tensor is a method.
def name_dynamo_source(source: Any) -> str:
    """Return where Dynamo found a tensor, as an expression."""
    return source.name() if callable(source.name) else source.name


# Older: all_reduce and reduce of scaled tensors refuse.
def get_reduction_name(boxed: Any) -> str:
    """Return the name of a collective's reduction, such as SUM, or raise NotImplementedError if torch does not say."""
    if not hasattr(boxed, "op"):
        raise make_torch_too_old_error("collectives of scaled tensors need to read the ReduceOp", "send x.decode()")
    return torch.distributed.ReduceOp.RedOpType(boxed.op()).name


@contextlib.contextmanager
def use_graph_partitioner(partition: Any, settings: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Let Inductor partition joint graphs by a function, without its caches; yield the settings to compile with."""
    from torch._functorch import config as functorch
    from torch._inductor import compile_fx, config, custom_graph_pass

    settings = {**settings, "fx_graph_cache": False}  # the caches' keys do not name all that the partition depends on
    with functorch.patch(enable_autograd_cache=False):
        if hasattr(config, "custom_partitioner_fn"):
            custom_graph_pass.CustomPartitionerFn.register(type(partition))
            partition.inner_partition = settings.get("custom_partitioner_fn", config.custom_partitioner_fn)
            yield {**settings, "custom_partitioner_fn": partition}
            return
        module: Any = compile_fx
        own, module.min_cut_rematerialization_partition = module.min_cut_rematerialization_partition, partition
        try:
            yield settings
        finally:
            module.min_cut_rematerialization_partition = own


# Older: nothing is lost; the hooks are counted where torch pushes them.
if hasattr(_torch_autograd, "_top_saved_tensors_default_hooks"):

    def get_saved_tensor_hooks() -> tuple[Callable, Callable] | None:
        """Return the pair of hooks for tensors that autograd saves now, None where there is none."""
        return _torch_autograd._top_saved_tensors_default_hooks(True)

else:

    class _Hooks(threading.local):
        def __init__(self) -> None:
            self.stack: list[tuple[Callable, Callable]] = []

    def get_saved_tensor_hooks() -> tuple[Callable, Callable] | None:
        """Return the pair of hooks for tensors that autograd saves now, None where there is none."""
        return _hooks.stack[-1] if _hooks.stack else None

    def _push(pack: Callable, unpack: Callable) -> None:
        _push_in_torch(pack, unpack)
        _hooks.stack.append((pack, unpack))

    def _pop() -> None:
        _pop_in_torch()
        del _hooks.stack[-1:]

    _hooks = _Hooks()
    _push_in_torch, _pop_in_torch = (
        _torch_autograd._push_saved_tensors_default_hooks,
        _torch_autograd._pop_saved_tensors_default_hooks,
    )
    _torch_autograd._push_saved_tensors_default_hooks, _torch_autograd._pop_saved_tensors_default_hooks = _push, _pop
