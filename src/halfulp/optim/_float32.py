"""Float32 beside 16-bit parameters: gradients that accumulate, and weights read from auxiliary tensors."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import torch

from .._torch_versions import HAS_GRADIENT_DTYPE, make_torch_too_old_error
from ..kernels import (
    IndexMap,
    Trace,
    address,
    check_bits,
    cut_into_chunks,
    disable_callers_modes,
    run_chunks,
    select_engine,
)
from ..kernels._device_function import ElementTraceBuilder, PointerTableFunction, bind_free_variables
from ..kernels._operations import store32, word
from ..kernels.triton._launch import PointerTableKernel, find_checked_kernel
from ..kernels.vector._machine_function import get_array_address
from ..kernels.vector._table_loop import compile_pointer_table_kernel
from ..subclass.models._conversion import check_is_module
from ._storage import Store
from .parameters._outside_writes import read_valid_auxiliary_tensors
from .parameters._parameter_plan import ParameterPlan
from .parameters._step_spec import NARROW_DTYPES
from .weight_updates._weight_update import WeightUpdate

Model = TypeVar("Model", bound=torch.nn.Module)


def float32_gradients(model: Model, enabled: bool = True) -> Model:
    """Let the gradients of a model's bfloat16 and float16 parameters accumulate in float32.

    A bfloat16 sum over n microbatches loses what falls under half an ulp of it: 1% and more at n = 128. Backward still
    computes each gradient in the parameter's dtype; only the sum is wider, at 2 more bytes per parameter while it
    lives. The step of every optimizer here takes float32 gradients as they are, clipping included; torch.optim's
    fused and foreach steps want the parameter's dtype.

    The choice sits on the parameters and stays through optimizer steps, `zero_grad`, tied uses, activation
    checkpointing and `model.to`. It is lost where a parameter is made anew: by `copy.deepcopy`, pickle, or when a
    module replaces it; call this again there. DistributedDataParallel refuses such gradients (its buckets have the
    parameter's dtype), and FSDP has `MixedPrecisionPolicy(reduce_dtype=torch.float32)` of its own.

    Args:
        model: whose parameters are changed, in place; float32 ones stay as they are, and gradients that exist already
            are converted.
        enabled: False for gradients in the parameters' dtype again.

    Returns:
        The model.

    Raises:
        TypeError: no module.
        NotImplementedError: a torch without `Tensor.grad_dtype`.

    >>> import torch, halfulp as hu
    >>> model = hu.float32_gradients(torch.nn.Linear(2, 2).bfloat16())
    >>> model(torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
    >>> model.weight.dtype, model.weight.grad.dtype
    (torch.bfloat16, torch.float32)
    """
    check_is_module(model, "float32_gradients")
    if not HAS_GRADIENT_DTYPE:
        raise make_torch_too_old_error(
            "gradients wider than their parameter need Tensor.grad_dtype", "train float32 parameters under autocast"
        )
    for parameter in model.parameters():
        if parameter.dtype in NARROW_DTYPES:
            dtype = torch.float32 if enabled else parameter.dtype
            gradient, parameter.grad = parameter.grad, None
            parameter.grad_dtype = dtype
            parameter.grad = None if gradient is None else gradient.to(dtype)
    return model


MAX_ELEMENTS_AT_ONCE = 1 << 21
# Where a launch costs more than its memory, for which the processor's caches are nothing.
MAX_DEVICE_ELEMENTS_AT_ONCE = 1 << 28


def read_float32_weights(plans: Sequence[ParameterPlan]) -> list[torch.Tensor]:
    """Return the float32 weights that parameters and their auxiliary tensors represent, contiguous and local."""
    payloads = [plan.payloads for plan in plans]
    out = [torch.empty(own[0].shape, dtype=torch.float32, device=own[0].device) for own in payloads]
    for update, store in {(plan.spec.update, plan.spec.store) for plan in plans}:
        mine = [k for k, plan in enumerate(plans) if (plan.spec.update, plan.spec.store) == (update, store)]
        parts = [[*(part.contiguous() for part in payloads[k]), *read_valid_auxiliary_tensors(plans[k])] for k in mine]
        own = [out[k] for k in mine]
        is_on_one_device = len({part.device for held in parts for part in held}) == 1
        engine, kernel = select_engine(own[0].device.type), None
        if engine == "triton" and is_on_one_device:
            kernel = _make_device_read_kernel(update, store, own[0].device)
        if engine == "llvm":
            _run_read_kernel(make_read_kernel(update, store), parts, own)
        elif kernel is not None:
            kernel(*_make_read_tables(parts, own), own[0].device)
        else:
            for held, new in zip(parts, own):
                new.copy_(update.read(store, held))
    return out


def split_plans_by_elements(plans: Iterable[ParameterPlan], most: int) -> Iterator[list[ParameterPlan]]:
    """Split plans into runs of at most `most` elements, with at least one plan each."""
    run: list[ParameterPlan] = []
    held = 0
    for plan in plans:
        count = math.prod(plan.shape)
        if run and held + count > most:
            yield run
            run, held = [], 0
        run.append(plan)
        held += count
    if run:
        yield run


def _run_read_kernel(
    kernel: Callable[..., None], parts: list[list[torch.Tensor]], out: list[torch.Tensor]
) -> list[torch.Tensor]:
    table, pointers = _make_read_tables(parts, out)
    run_chunks(kernel, table[:, 2], get_array_address(table), get_array_address(pointers), *[0] * 4)
    return out


def _make_read_tables(parts: list[list[torch.Tensor]], out: list[torch.Tensor]) -> tuple[np.ndarray, np.ndarray]:
    """Return the chunk and pointer tables of the kernel."""
    rows = [[*map(address, own), *[0] * (4 - len(own)), address(new)] for own, new in zip(parts, out)]
    return _make_chunk_table(tuple(new.numel() for new in out)), np.array(rows, np.int64)


@functools.lru_cache(256)
def _make_chunk_table(counts: tuple[int, ...]) -> np.ndarray:
    return np.concatenate([cut_into_chunks(IndexMap.whole((count,)), row) for row, count in enumerate(counts)])


def _record_read_trace(update: WeightUpdate, store: Store) -> Trace:
    """Return the weight of an element as a device function: columns are the parameter, three tensors, the result."""
    element, names = ElementTraceBuilder(5), update.make_bindings(store)
    *arrays, out = element.arrays
    read: Any = names["read_weight"]
    store32(out, element.index, word(bind_free_variables(read, names)(*arrays, element.index)[0]))
    return element.trace


@functools.cache
@disable_callers_modes()
def make_read_kernel(update: WeightUpdate, store: Store) -> Callable[..., None]:
    """Return the kernel that reads one weight update and store, checked against its reference once per process."""
    name = f"read_{update.name}_{store.name}".replace("-", "_")
    kernel = compile_pointer_table_kernel(name, PointerTableFunction(_record_read_trace(update, store), 5))
    parts = _make_check_tensors(update, store)
    out = torch.empty(64, dtype=torch.float32, device="cpu")
    check_bits(name, lambda: _run_read_kernel(kernel, [parts], [out]), lambda: [update.read(store, parts)])
    return kernel


def _make_device_read_kernel(update: WeightUpdate, store: Store, device: torch.device) -> PointerTableKernel | None:
    """Return the kernel of `make_read_kernel` on an accelerator; None, counted, where there is none."""

    def run_on_check_tensors(kernel: PointerTableKernel, device: torch.device) -> list[torch.Tensor]:
        parts = [part.to(device) for part in _make_check_tensors(update, store)]
        out = [torch.empty(count, dtype=torch.float32, device=device) for count in (64, 61)]
        kernel(*_make_read_tables([parts, parts], out), device)
        return [made.cpu() for made in out]

    def compute_reference() -> list[torch.Tensor]:
        wanted = update.read(store, _make_check_tensors(update, store))
        return [wanted, wanted[:61]]

    kernel: PointerTableKernel | None = find_checked_kernel(
        ("read", update, store),
        f"read {update.name} {store.name}",
        device,
        lambda: PointerTableKernel(PointerTableFunction(_record_read_trace(update, store), 5)),
        run_on_check_tensors,
        compute_reference,
    )
    return kernel


def _make_check_tensors(update: WeightUpdate, store: Store) -> list[torch.Tensor]:
    ramp = torch.linspace(-1, 1, 64, dtype=torch.float32, device="cpu")
    dtypes = (store.dtype, *(dtype for _, dtype in update.describe_auxiliary_tensors(store)))
    parts = [torch.zeros(64, dtype=dtype, device="cpu") for dtype in dtypes]
    update.fill(store, parts, ramp * ramp * ramp)
    # As somebody else may have written them; torch 2.6 puts no infinity into float8_e4m3fn by itself.
    parts[0][11:14] = torch.tensor([torch.inf, 0.0, 0.0], dtype=torch.float32, device="cpu").to(store.dtype)
    parts[0][14] = parts[0][30]
    return parts
