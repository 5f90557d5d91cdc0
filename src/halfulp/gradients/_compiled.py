"""The compiled front end: a backend of torch.compile that moves gradients between sites inside the backward graph."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from . import _graph_operators, _graph_pass, _graph_roles, _graph_writer, _products
from ._backward import Backward
from ._borders import reached
from ._graph_operators import scaled_here
from ._graph_pass import Plan, path_of
from ._graph_writer import move_gradients
from ._products import kind_of, name_of
from ._site import Site

BACKENDS = ("inductor", "aot_eager")
# What autograd calls a graph that is compiled.
_GRAPH = "CompiledFunctionBackward"
_ATTRIBUTE = re.compile(r"_(?:modules|parameters)\['([^']+)'\]|__self__\.(\w+)")


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
        partition = Partition(backward.handle, planned(module, inputs, backward))
        unmark(module, backward.handle)
        return _COMPILERS[name](module, inputs, partition, options, mode)

    return compile_scaled


class Partition:
    """Parts a joint graph as torch does, and moves gradients in the backward one: a CustomPartitionerFn of Inductor."""

    def __init__(self, scaler: str, plan: Plan, inner: Any = None) -> None:
        self.scaler = scaler
        self.plan = plan
        self.inner = inner

    def __call__(self, module: GraphModule, inputs: Sequence[object], **kwargs: Any) -> tuple[GraphModule, GraphModule]:
        part = self.inner or torch._functorch.partitioners.min_cut_rematerialization_partition
        forward, backward = part(module, inputs, **kwargs)
        move_gradients(backward, self.plan, self.scaler)
        return forward, backward

    def uuid(self) -> tuple:
        """What torch's caches of graphs must know."""
        from torch._inductor.custom_graph_pass import get_hash_for_files

        files = (_graph_operators, _graph_pass, _graph_roles, _graph_writer, _products)
        sources = get_hash_for_files((__file__, *(one.__file__ for one in files)))
        inner = self.inner.uuid() if self.inner else None
        return sources, self.scaler, *self.plan.words(), inner


def _inductor(module: GraphModule, inputs: Sequence, partition: Partition, options: dict | None, mode: str | None):
    from torch._inductor import config, list_mode_options
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

    CustomPartitionerFn.register(Partition)
    patches = {**list_mode_options(mode or "default"), **(options or {})}
    partition.inner = patches.get("custom_partitioner_fn", config.custom_partitioner_fn)
    return compile_fx(module, inputs, config_patches={**patches, "custom_partitioner_fn": partition})


def _aot_eager(module: GraphModule, inputs: Sequence, partition: Partition, options: dict | None, mode: str | None):
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop

    compiler = aot_autograd(fw_compiler=boxed_nop, partition_fn=partition, keep_inference_input_mutations=True)
    return compiler(module, inputs)


_COMPILERS = {"inductor": _inductor, "aot_eager": _aot_eager}


# the forward graph ------------------------------------------------------------------------------------------


def unmark(module: GraphModule, scaler: str) -> None:
    """Take the marks of this scaler out."""
    for node in list(module.graph.nodes):
        if node.target is scaled_here and node.args[1] == scaler:
            node.replace_all_uses_with(node.args[0])
            module.graph.erase_node(node)
    module.recompile()


def check_breaks(inputs: Sequence, backward: Backward) -> None:
    """Warn where a model's parameters are read outside of its graphs: exponents of their own need a graph.

    Raises:
        NotImplementedError: the gradients there would not be rounded as all others are.
    """

    def ends(node: Any) -> bool:
        # Marks are where another model ends that is not compiled, whose parameters have sites.
        return node.name() == _GRAPH or backward.sites.anchor in node.metadata

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
    name = _listed(parameter, backward)
    if name is not None:
        yield repr(name)
    elif isinstance(parameter, nn.Parameter) and any(one.sharded() for one in backward.names):
        yield "modules that fully_shard wraps"


def _shortened(words: list[str], most: int = 5) -> str:
    rest = len(words) - most
    return ", ".join(words[:most]) + (f" and {rest} more" if rest > 0 else "")


def planned(module: GraphModule, inputs: Sequence, backward: Backward) -> Plan:
    """The sites of a forward graph's products, with the keys of the eager front end, and of its parameters."""
    placeholders = module.graph.find_nodes(op="placeholder")
    parameters = {node: x for node, x in zip(placeholders, inputs) if isinstance(x, nn.Parameter)}
    owners = {x: _owner(node, x, backward) for node, x in parameters.items()}
    parents = {owner.rpartition(".")[0] for owner in owners.values()}
    keys: dict[str, str] = {}
    calls: Counter[str] = Counter()
    made_at: dict[nn.Parameter, Site] = {}
    for node in _nodes(module, parameters):
        stack = node.meta.get("source_fn_stack")
        if node.op not in ("call_function", "call_method") or not stack:
            continue
        kind = kind_of(node.target)
        read = [parameters[x] for x in node.all_input_nodes if x in parameters]
        place = [owners[read[0]]] if read else _place(node, parents)
        if kind not in ("product", "cell") or not read:
            # Other functions have products in their derivatives, too.
            place = [*place, name_of(node.target)]
        key = ".".join(place)
        path = path_of(stack)
        keys[path] = f"{key}#{calls[key]}" if calls[key] else key
        calls[key] += kind != "cell"
        if kind in ("product", "cell"):
            made_at |= {x: backward.sites.open(keys[path]) for x in read if x not in made_at}
    for parameter in owners:
        backward.reads(parameter, made_at.get(parameter, backward.sites.anchor))
    return Plan(
        keys,
        tuple(node in parameters for node in placeholders),
        rounds=backward.format is not None,
        watches=backward.policy.wants_operands,
    )


def _nodes(module: GraphModule, parameters: dict[Node, nn.Parameter], outer: tuple = ()) -> Iterator[Node]:
    """A graph's nodes, and those of checkpoints' bodies; which of those are parameters is noted on the way."""
    for node in module.graph.nodes:
        stack = node.meta.get("source_fn_stack")
        if stack and outer:
            # All checkpoints have one name there.
            stack = node.meta["source_fn_stack"] = [*outer, stack[-1]]
        yield node
        if node.target is torch.ops.higher_order.tag_activation_checkpoint:
            body = getattr(module, node.args[0].target)
            given = zip(body.graph.find_nodes(op="placeholder"), node.args[1:])
            parameters |= {x: parameters[y] for x, y in given if isinstance(y, Node) and y in parameters}
            yield from _nodes(body, parameters, tuple(stack))


def _owner(node: Node, parameter: nn.Parameter, backward: Backward) -> str:
    """The qualified name of the module that holds a parameter."""
    return _listed(parameter, backward) or _path(node.meta["grapharg"].source.name).rpartition(".")[0] or "model"


def _listed(parameter: Tensor, backward: Backward) -> str | None:
    return next((name for name in (one.of(parameter) for one in backward.names) if name), None)


def _path(source: str) -> str:
    return ".".join(a or b for a, b in _ATTRIBUTE.findall(source))


def _place(node: Node, parents: set[str]) -> list[str]:
    """The innermost module with parts that a node runs in."""
    for path, _ in reversed(list((node.meta.get("nn_module_stack") or {}).values())):
        # A part is reached through what stands in the place of its forward.
        name = path.replace(".forward.inner.__self__", "").partition("__self__.")[2]
        found = [parent for parent in parents if name and f".{parent}".endswith(f".{name}")]
        if found:
            return [min(found, key=len)]
    return []
