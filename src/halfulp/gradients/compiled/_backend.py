"""The compiled front end: a backend of torch.compile that moves gradients between sites inside the backward graph."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from ..._torch_versions import NAMES_ALL_FUNCTIONS, adds_gradients, is_backward, join_scaled_sums, partitioned_by
from .. import _products
from ..eager._backward import Backward, nodes_behind
from . import _graph_sites, _graph_writer, _placement, _runtime_operators
from ._graph_sites import find_owner, plan_sites
from ._graph_writer import move_gradients
from ._placement import Plan
from ._runtime_operators import scaled_here

# Where torch keeps the functions of forward nodes, and those of backward nodes.
_OWN, _FORWARD = "source_fn_stack", "fwd_source_fn_stack"


def name_functions(joint: GraphModule) -> None:
    """Give backward nodes their forward functions' names, as torch does, where it gave none: in-place functions.

    Torch finds the function that a backward node is in the derivative of by autograd's sequence numbers: a node of the
    forward pass has the number of autograd's latest node as it was made. Two kinds of autograd's nodes have none of the
    forward pass's. An in-place function whose derivative needs what it overwrites keeps a clone, which is made between
    autograd's node and the write, so that the write has the clone's number, the next one. And a write into a view is
    followed by a node of its own (CopySlices), after the write, which has the number before. What CopySlices does
    begins with an empty tensor.
    """
    nodes = [node for one in joint.modules() if isinstance(one, GraphModule) for node in one.graph.nodes]
    forward: dict[int, list] = {}
    unnamed: dict[int, list[Node]] = {}
    for node in nodes:
        number = node.meta.get("seq_nr")
        if node.op != "call_function" or number is None:
            continue
        if not is_backward(node):
            forward.setdefault(number, node.meta.get(_OWN))
        elif adds_gradients(node):
            node.meta.pop(_FORWARD, None)
        else:
            unnamed.setdefault(number, []).append(node)
    for number, made in unnamed.items():
        if number not in forward:
            begins_empty = made[0].target is torch.ops.aten.new_empty_strided.default
            stack = forward.get(number - 1 if begins_empty else number + 1)
            for node in made:
                node.meta[_FORWARD] = stack
        elif not NAMES_ALL_FUNCTIONS:
            for node in made:
                node.meta[_FORWARD] = forward[number]


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
        partition = Partition(backward.handle, plan_sites(module, inputs, backward))
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

        files = (_runtime_operators, _placement, _graph_sites, _graph_writer, _products)
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

    behind = nodes_behind([x.grad_fn for x in inputs if isinstance(x, Tensor)], ends)
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
    name = find_owner(parameter, backward)
    if name is not None:
        yield repr(name)
    elif isinstance(parameter, nn.Parameter) and any(one.sharded() for one in backward.names):
        yield "modules that fully_shard wraps"


def _shortened(words: list[str], most: int = 5) -> str:
    rest = len(words) - most
    return ", ".join(words[:most]) + (f" and {rest} more" if rest > 0 else "")
