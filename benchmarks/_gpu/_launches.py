"""Kernel launches and synchronisations of scaled tensors, counted on a CPU: `python -m benchmarks._gpu._launches`.

Rules run as on an accelerator, where no value is looked at; every plain operator below the subclass that computes is a
launch, and one that would wait for a device, or copy from memory of the host that is not pinned, a synchronisation.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

import halfulp as hu
from halfulp.scaled import ScaledTensor, _derivation
from halfulp.scaled import _fused as fused
from halfulp.scaled import _powers_of_two as _powers

STORAGES = ("float32", "bfloat16", "float16", "fp8 products")
# What asks for a number, or whose size depends on values; what torch copies from the host; what reads a constant.
_WAITING = {"_local_scalar_dense", "nonzero", "is_nonzero", "equal", "item", "masked_select", "_unique2"}
_WAITING |= {"lift_fresh", "masked_fill.Tensor", "masked_fill_.Tensor"}
_WAITING |= {"index_fill.int_Tensor", "index_fill_.int_Tensor"}
_IDLE = ("promote_types", "result_type", "detach", "alias", "_unsafe_view", "lift_fresh", "_reshape_alias", "set_")
# These copy, then write, or make a number first.
_TWO = {"masked_fill", "index_put", "scatter", "index_add", "index_copy", "index_fill"}
_TWO |= {"where.ScalarOther", "where.ScalarSelf", "where.Scalar"}


@dataclasses.dataclass
class Counts:
    """Launches and synchronisations, by the operator and the function of the library that calls it."""

    launches: collections.Counter[tuple[str, str]] = dataclasses.field(default_factory=collections.Counter)
    synchronisations: collections.Counter[tuple[str, str]] = dataclasses.field(default_factory=collections.Counter)


class _Counting(TorchDispatchMode):
    """Counts the plain operators that run below scaled tensors, and beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counts()

    def __torch_dispatch__(self, operator, types, arguments=(), options=None):
        if any(kind is ScaledTensor for kind in types):
            return NotImplemented  # the subclass takes it apart, and what it calls comes here
        name, overload = operator._schema.name.removeprefix("aten::"), operator._overloadname
        place = _caller(), f"{name}.{overload}"
        given = tree_leaves((arguments, options or {}))
        has_mask = name == "index" and any(getattr(x, "dtype", None) in (torch.bool, torch.uint8) for x in given[1:])
        if has_mask or {name, f"{name}.{overload}"} & _WAITING:
            self.counts.synchronisations[place] += 1
        results = operator(*arguments, **(options or {}))
        if operator.is_view or name in ("contiguous", "reshape"):
            self.counts.launches[place] += not _is_same_memory(results, given[0])  # such as `to` another dtype
        elif name not in _IDLE and not name.startswith(("empty", "new_empty")):
            self.counts.launches[place] += 1 + bool({name, f"{name}.{overload}"} & _TWO)
        return results


def _is_same_memory(results, x) -> bool:
    return all(y.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for y in tree_leaves(results))


def _caller() -> str:
    """The library's functions that led here, the innermost two."""
    frame, found = sys._getframe(2), []
    while frame is not None and len(found) < 3:
        path = frame.f_code.co_filename
        if "/halfulp/" in path and not path.endswith(("_rule_table.py", "_opaque_frames.py", "_scaled_tensor.py")):
            found.append(f"{path.rsplit('/', 1)[1].removesuffix('.py')}.{frame.f_code.co_name}")
        frame = frame.f_back
    return " < ".join(found) or "torch"


@contextlib.contextmanager
def blind() -> Iterator[None]:
    """Let rules look at no value, as where tensors are on an accelerator."""
    with (
        mock.patch.object(_powers, "has_readable_values", return_value=False),
        mock.patch.object(_derivation, "has_readable_values", return_value=False),
    ):
        yield


@contextlib.contextmanager
def fused_kernels(counts: Counts | None = None) -> Iterator[None]:
    """Let rules take their fused kernels, computed by torch, and count one launch for each."""

    def run(key, build, launch, by_torch, payloads, scales):
        if counts is not None:
            counts.launches[_caller(), f"fused {key[0]}"] += 1 + (key[0] == "level")
        with _disable_current_modes():
            return by_torch(*payloads, *scales)

    with (
        mock.patch.object(_powers, "has_fused_kernels", lambda x: type(x) is torch.Tensor),
        mock.patch.object(fused, "_launch_or_run_by_torch", run),
    ):
        yield


@contextlib.contextmanager
def counting(with_kernels: bool = True) -> Iterator[Counts]:
    """Count what runs inside, as on an accelerator, with fused kernels or without Triton."""
    with blind(), _Counting() as mode, fused_kernels(mode.counts) if with_kernels else contextlib.nullcontext():
        yield mode.counts


class Training(dict[str, Callable[[], object]]):
    """The parts of a training step, to be called in order, and the model."""

    model: torch.nn.Module


def training(storage: str) -> Training:
    """A training step of the two-layer GPT, in a storage, or of a plain one."""
    from halfulp.trials.tasks._text import GPT

    torch.manual_seed(0)
    ids = torch.randint(0, 64, (4, 33))
    model = GPT(64, width=64, layers=2, heads=2, time=32, fused=True)
    if storage == "fp8 products":
        model = hu.scalify(model, torch.float16, matmul="fp8")
    elif storage != "plain":
        model = hu.scalify(model, getattr(torch, storage))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    held: dict[str, torch.Tensor] = {}

    def forward() -> None:
        logits = model(ids[:, :-1])
        held["loss"] = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

    def clear() -> None:
        held.clear()
        optimizer.zero_grad()

    parts = Training(
        {
            "forward": forward,
            "backward": lambda: held["loss"].backward(),
            "clipping": lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False),
            "torch's AdamW": lambda: optimizer.step(),
            "clear": clear,
        }
    )
    parts.model = model
    return parts


def counted(storage: str, with_kernels: bool = True) -> dict[str, Counts]:
    """The counts of each part of the second training step."""
    parts = training(storage)
    with blind():
        for part in parts.values():
            part()
    found = {}
    for name, part in parts.items():
        with counting(with_kernels) as found[name]:
            part()
    del found["clear"]
    return found


def main() -> None:
    """Print the counts, and where most of them are."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--storage", choices=("plain", *STORAGES), action="append")
    parser.add_argument("--most", type=int, default=0, help="so many places of each part are printed")
    parser.add_argument("--without-kernels", action="store_true", help="as without Triton")
    given = parser.parse_args()
    for storage in given.storage or ("plain", *STORAGES):
        for part, counts in counted(storage, not given.without_kernels).items():
            launches, waits = sum(counts.launches.values()), sum(counts.synchronisations.values())
            print(f"{storage:14} {part:14} {launches:6} launches {waits:5} synchronisations")
            for kind in (counts.synchronisations, counts.launches):
                for (place, operator), count in kind.most_common(given.most):
                    print(f"    {count:5} {operator:28} {place}")


if __name__ == "__main__":
    main()
