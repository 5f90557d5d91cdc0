"""The compiled front end: a backend of torch.compile that moves gradients between sites inside the backward graph."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from ..._torch_versions import join_scaled_sums, partitioned_by
from ..eager import _products
from ..eager._backward import Backward
from ..eager._site_boundaries import reached
from . import _graph_functions, _graph_pass, _graph_roles, _graph_sites, _graph_writer
from . import _runtime_operators as _graph_operators
from ._graph_functions import name_functions
from ._graph_pass import Plan
from ._graph_sites import listed, planned
from ._graph_writer import move_gradients
from ._runtime_operators import scaled_here

BACKENDS = ("inductor", "aot_eager")
# What autograd calls a graph that is compiled.
_GRAPH = "CompiledFunctionBackward"


# the backend ------------------------------------------------------------------------------------------------


def backend(backward: Backward, name: str = "inductor") -> Callable[..., Any]:
    """A backend of torch.compile for models with a scaler.

    Args:
        backward: The scaler's.
        name: Which of torch's backends compiles: "inductor" or "aot_eager".

    Raises:
        ValueError: a name that is not allowed.
    """
    if name not in BACKENDS:
        raise ValueError(f"the backend is one of {', '.join(BACKENDS)}, got {name!r}")

    def compile_scaled(module: GraphModule, inputs: Sequence, *, options: dict | None = None, mode: str | None = None):
        check_breaks(inputs, backward)
        join_scaled_sums(module.graph)
        partition = Partition(backward.handle, planned(module, inputs, backward))
        unmark(module, backward.handle)
        return _COMPILERS[name](module, inputs, partition, options, mode)

    return compile_scaled


class Partition:
    """Partitions a joint graph as torch does, and moves gradients in its backward graph: a CustomPartitionerFn."""

    def __init__(self, scaler: str, plan: Plan, inner: Any = None) -> None:
        self.scaler = scaler
        self.plan = plan
        self.inner = inner

    def __call__(self, module: GraphModule, inputs: Sequence[object], **kwargs: Any) -> tuple[GraphModule, GraphModule]:
        name_functions(module)
        part = self.inner or torch._functorch.partitioners.min_cut_rematerialization_partition
        forward, backward = part(module, inputs, **kwargs)
        move_gradients(backward, self.plan, self.scaler)
        return forward, backward

    def uuid(self) -> tuple:
        """The key of this partitioner in torch's caches of graphs."""
        from torch._inductor.custom_graph_pass import get_hash_for_files

        files = (_graph_functions, _graph_operators, _graph_pass, _graph_roles, _graph_sites, _graph_writer, _products)
        sources = get_hash_for_files((__file__, *(one.__file__ for one in files)))
        inner = self.inner.uuid() if self.inner else None
        return sources, self.scaler, *self.plan.words(), inner


def _inductor(module: GraphModule, inputs: Sequence, partition: Partition, options: dict | None, mode: str | None):
    from torch._inductor import list_mode_options
    from torch._inductor.compile_fx import compile_fx

    patches = {**list_mode_options(mode or "default"), **(options or {})}
    with partitioned_by(partition, patches) as patches:
        return compile_fx(module, inputs, config_patches=patches)


def _aot_eager(module: GraphModule, inputs: Sequence, partition: Partition, options: dict | None, mode: str | None):
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop

    compiler = aot_autograd(fw_compiler=boxed_nop, partition_fn=partition, keep_inference_input_mutations=True)
    return compiler(module, inputs)


_COMPILERS = {"inductor": _inductor, "aot_eager": _aot_eager}


# the forward graph ------------------------------------------------------------------------------------------


def unmark(module: GraphModule, scaler: str) -> None:
    """Remove the marks of this scaler from a graph."""
    for node in list(module.graph.nodes):
        if node.target is scaled_here and node.args[1] == scaler:
            node.replace_all_uses_with(node.args[0])
            module.graph.erase_node(node)
    module.recompile()


def check_breaks(inputs: Sequence, backward: Backward) -> None:
    """Warn where a model's parameters are read outside of its graphs, as sites exist only in graphs.

    Raises:
        NotImplementedError: the gradients there would not be rounded as all others are.
    """

    def ends(node: Any) -> bool:
        # Marks are where another model ends that is not compiled, whose parameters have sites.
        return node.name() == _GRAPH or backward.sites.global_site in node.metadata

    behind = reached([x.grad_fn for x in inputs if isinstance(x, Tensor)], ends)
    broken = {name for node in behind if hasattr(node, "variable") for name in _owners(node.variable, backward)}
    names = _shortened(sorted(broken))
    if names and backward.format is not None:
        raise NotImplementedError(
            f"torch.compile breaks the model's graph and leaves {names} uncompiled, whose gradients would not be "
            f"rounded to {backward.format.name}: torch.compile(..., fullgraph=True) shows why; or leave the model "
            "uncompiled, too"
        )
    if names:
        warnings.warn(
            f"torch.compile breaks the model's graph and leaves {names} uncompiled, where all gradients have the "
            "global exponent: torch.compile(..., fullgraph=True) shows why; or leave the model uncompiled, too, which "
            "gives them exponents of their own",
            stacklevel=2,
        )


def _owners(parameter: Tensor, backward: Backward) -> Iterator[str]:
    """The module that holds a parameter, if it is a scaler's; none is known of FSDP's copies of parameters."""
    name = listed(parameter, backward)
    if name is not None:
        yield repr(name)
    elif isinstance(parameter, nn.Parameter) and any(one.sharded() for one in backward.names):
        yield "modules that fully_shard wraps"


def _shortened(words: list[str], most: int = 5) -> str:
    rest = len(words) - most
    return ", ".join(words[:most]) + (f" and {rest} more" if rest > 0 else "")
