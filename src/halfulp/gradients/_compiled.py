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

from ..kernels import define_operator
from . import _graph_pass, _products
from ._backward import ALIVE, Backward, shifted
from ._escape import reached
from ._graph_pass import Crossing, Placement, Plan, path_of
from ._products import kind_of, name_of
from ._site import Site

BACKENDS = ("inductor", "aot_eager")
# Separates what a string argument of an operator lists; a site's key has neither.
_ITEM, _PART = "\n", "\t"
# After the kind of a gradient that has the global exponent and not the site's.
_SHARED = "*"
# What autograd calls a graph that is compiled.
_GRAPH = "CompiledFunctionBackward"
_ATTRIBUTE = re.compile(r"_(?:modules|parameters)\['([^']+)'\]|__self__\.(\w+)")


# what runs in compiled graphs -------------------------------------------------------------------------------


class Factors:
    """2^(target - source) of a graph's edges, on a device, made again where exponents changed."""

    def __init__(self, backward: Backward, edges: str, device: torch.device) -> None:
        keys, *pairs = edges.split(_ITEM)
        sites = [backward.sites.open(key) for key in keys.split(_PART)]
        self.sites = dict.fromkeys(site for site in sites if site is not backward.sites.anchor)
        self._edges = [tuple(sites[int(i)] for i in pair.split(_PART)) for pair in pairs]
        for source, target in self._edges:
            backward.crossing(target, source)
        self._device = device
        self._exponents: list[int] = []
        self._values = torch.empty(0)

    def now(self) -> Tensor:
        """The factors for the exponents that hold; a new tensor, as compilers may write into it."""
        exponents = [target.exponent - source.exponent for source, target in self._edges]
        if exponents != self._exponents:
            self._exponents = exponents
            self._values = torch.tensor([2.0**e for e in exponents]).to(self._device)
        return self._values.clone()


def _factors(scaler: str, edges: str, count: int, device: torch.device) -> Tensor:
    backward = ALIVE.get(scaler)
    if backward is None or not backward.active:
        return torch.ones(count, device=device)
    known = backward.factors.get((edges, device))
    if known is None:
        known = backward.factors[edges, device] = Factors(backward, edges, device)
    backward.order.update(known.sites)
    return known.now()


def _observe(gradients: list[Tensor], scaler: str, site: str, kinds: str) -> None:
    backward = ALIVE.get(scaler)
    if backward is None or not backward.measuring or not backward.active:
        return
    where = backward.sites.open(site)
    backward.order.setdefault(where)
    for kind, gradient in zip(kinds.split(_PART), gradients):
        exponent = where.exponent - backward.sites.anchor.exponent if kind.endswith(_SHARED) else 0
        backward.measurements.add(where, kind.removesuffix(_SHARED), shifted(gradient, exponent), None)


def _refuse(out: Tensor, scaler: str) -> Tensor:
    raise ValueError(
        "the model has an AdaptiveGradScaler but was compiled by another backend, which would keep all its gradients "
        'at one exponent in silence: compile it with torch.compile(model, backend=scaler.backend("inductor")), of the '
        "same scaler"
    )


_factors_of = define_operator(
    "gradient_factors(str scaler, str edges, int count, Device device) -> Tensor",
    _factors,
    lambda scaler, edges, count, device: torch.empty(count, device=device),
)
_observed = define_operator(
    "observe_gradients(Tensor[] gradients, str scaler, str site, str kinds) -> ()", _observe, lambda *_: None
)
_scaled_here = define_operator(
    "scaled_here(Tensor out, str scaler) -> Tensor", _refuse, lambda out, scaler: torch.empty_like(out)
)
# Inductor cuts an expression where it reads too much, and with that decides what it computes by vectors and what one by
# one: exp, for instance, in other last bits. A loss's gradient, which much may read, is moved apart from all that.
_moved_number = define_operator(
    "moved_number(Tensor gradient, Tensor factor) -> Tensor", torch.mul, lambda gradient, _: torch.empty_like(gradient)
)
torch.fx.node.has_side_effect(_observed)
# Traced by other backends on the way to its refusal.
torch.library.register_autograd("halfulp::scaled_here", lambda _, gradient: (gradient, None))


def marked(out: Tensor, scaler: str, wide: bool) -> Tensor:
    """A model's output in a graph that is compiled, for the scaler's backend to know it by."""
    if not out.requires_grad:
        return out
    return _scaled_here(out.float() if wide and out.dtype == torch.float16 else out, scaler)


# the backend ------------------------------------------------------------------------------------------------


def backend(backward: Backward, name: str = "inductor") -> Callable[..., Any]:
    """A backend of torch.compile for models with a scaler.

    Args:
        backward: The scaler's.
        name: Which of torch's backends compiles: "inductor" or "aot_eager".

    Raises:
        ValueError: a name that is not allowed.
        NotImplementedError: gradients are rounded to a format of their own, or the policy reads products' operands.
    """
    if name not in BACKENDS:
        raise ValueError(f"the backend is one of {', '.join(BACKENDS)}, got {name!r}")
    if backward.format is not None:
        raise NotImplementedError(
            f"gradients are rounded to {backward.format.name}, which compiled graphs do not do: leave the model "
            "uncompiled, or take format=None"
        )

    if backward.policy.wants_operands:
        raise NotImplementedError(
            f"policy {backward.policy.name!r} reads the operands of products, which compiled graphs do not show: leave "
            "the model uncompiled, or take policy='amax'"
        )

    def compile_scaled(module: GraphModule, inputs: Sequence, *, options: dict | None = None, mode: str | None = None):
        warn_of_breaks(inputs, backward)
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

        sources = get_hash_for_files((__file__, _graph_pass.__file__, _products.__file__))
        inner = self.inner.uuid() if self.inner else None
        return sources, self.scaler, tuple(self.plan.keys.items()), self.plan.parameters, inner


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
        if node.target is _scaled_here and node.args[1] == scaler:
            node.replace_all_uses_with(node.args[0])
            module.graph.erase_node(node)
    module.recompile()


def warn_of_breaks(inputs: Sequence, backward: Backward) -> None:
    """Warn where a model's parameters are read outside of its graphs: exponents of their own need a graph."""

    def ends(node: Any) -> bool:
        # Marks are where another model ends that is not compiled, whose parameters have sites.
        return node.name() == _GRAPH or backward.sites.anchor in node.metadata

    behind = reached([x.grad_fn for x in inputs if isinstance(x, Tensor)], ends)
    broken = {_listed(node.variable, backward) for node in behind if hasattr(node, "variable")}
    names = ", ".join(sorted(repr(name) for name in broken if name))
    if names:
        warnings.warn(
            f"torch.compile breaks the model's graph and leaves {names} uncompiled, where all gradients have the "
            "global exponent: torch.compile(..., fullgraph=True) shows why; or leave the model uncompiled, too, which "
            "gives them exponents of their own",
            stacklevel=2,
        )


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
    return Plan(keys, tuple(node in parameters for node in placeholders))


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
        name = path.partition("__self__.")[2]
        found = [parent for parent in parents if name and f".{parent}".endswith(f".{name}")]
        if found:
            return [min(found, key=len)]
    return []


# the backward graph -----------------------------------------------------------------------------------------


def move_gradients(module: GraphModule, plan: Plan, scaler: str) -> None:
    """Write factors and observations into a backward graph."""
    placement = Placement(module, plan)
    crossings = placement.crossings()
    writer = Writer(module, scaler, placement.keys(), crossings)
    moved = {writer.move(crossing): None for crossing in crossings}
    for seen in placement.seen(moved):
        if not seen.found:
            continue
        kinds, nodes, shared = zip(*seen.found.values())
        words = _PART.join(kind + _SHARED * s for kind, s in zip(kinds, shared))
        with module.graph.inserting_after(max(nodes)):
            writer.write(_observed, list(nodes), scaler, seen.key, words)
    module.graph.lint()
    module.recompile()


class Writer:
    """Writes nodes into a backward graph, with their values in meta."""

    def __init__(self, module: GraphModule, scaler: str, keys: list[str], crossings: list[Crossing]) -> None:
        self._module = module
        self._scaler = scaler
        pairs = dict.fromkeys((crossing.source, crossing.target) for crossing in crossings)
        self._places = {pair: i for i, pair in enumerate(pairs)}
        index = {key: str(i) for i, key in enumerate(keys)}
        self._edges = _ITEM.join([_PART.join(keys), *(_PART.join(index[key] for key in pair) for pair in pairs)])
        self._vectors: dict[torch.device, Node] = {}

    def write(self, target: Callable, *args: Any) -> Node:
        """A call, and what it gives for tensors without data."""
        node = self._module.graph.call_function(target, args)
        values = torch.fx.node.map_arg(args, lambda x: x.meta["val"])
        node.meta["val"] = target(*values)
        return node

    def move(self, crossing: Crossing) -> Node:
        """The node times the factor of its edge, in float32 where it is half as wide; its readers take that."""
        node = crossing.node
        dtype = node.meta["val"].dtype
        half = dtype in (torch.float16, torch.bfloat16)
        cast = torch.ops.prims.convert_element_type.default
        vector = self._vector(node)
        with self._module.graph.inserting_before(min(crossing.readers)):
            factor = self.write(torch.ops.aten.select.int, vector, 0, self._places[crossing.source, crossing.target])
            wide = self.write(cast, node, torch.float32) if half else node
            times = torch.ops.aten.mul.Tensor if node.meta["val"].dim() else _moved_number
            moved = self.write(times, wide, factor)
            moved = self.write(cast, moved, dtype) if half else moved
        for reader in crossing.readers:
            reader.replace_input_with(node, moved)
        return moved

    def _vector(self, like: Node) -> Node:
        """The factors of all edges, on the device of a node."""
        value = like.meta["val"]
        if value.device not in self._vectors:
            first = next(node for node in self._module.graph.nodes if node.op != "placeholder")
            with self._module.graph.inserting_before(first), value.fake_mode:
                args = (self._scaler, self._edges, len(self._places), value.device)
                self._vectors[value.device] = self.write(_factors_of, *args)
        return self._vectors[value.device]
