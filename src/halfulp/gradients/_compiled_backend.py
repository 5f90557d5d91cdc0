"""The compiled front end: a backend of torch.compile that moves gradients between sites inside the backward graph."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from .._torch_versions import (
    NAMES_ALL_FUNCTIONS,
    is_backward,
    is_gradient_sum,
    join_scaled_sums,
    name_dynamo_source,
    partition_graphs_by,
)
from ..kernels import define_operator
from . import _compiled_placement as _placement
from . import _functions
from ._compiled_placement import (
    HALF_DTYPES,
    Edge,
    MeasuredGradient,
    SitePlacement,
    SitePlan,
    name_nested_function,
)
from ._functions import OperatorKind, classify_function, get_function_name
from ._site import GLOBAL_KEY, multiply_by_power
from .eager._attach import SINGLE_SITE_MODULES, mark_scaled_output
from .eager._backward import LIVE_BACKWARDS, Backward, list_nodes_behind, refuse_float16_gradient

# Separates what a string argument of an operator lists; a site's key has neither.
ITEM, PART = "\n", "\t"
# After the kind of a gradient that has the global exponent and not the site's.
SHARED_KIND_SUFFIX = "*"


class EdgeFactors:
    """Holds the factors 2^(target - source) of a graph's edges on a device, and renews them when exponents change."""

    def __init__(self, backward: Backward, edges: str, device: torch.device) -> None:
        keys, *pairs = edges.split(ITEM)
        sites = [backward.sites.open_site(key) for key in keys.split(PART)]
        self.sites = dict.fromkeys(site for site in sites if site is not backward.sites.global_site)
        self._edges = [tuple(sites[int(i)] for i in pair.split(PART)) for pair in pairs]
        for source, target in self._edges:
            backward.get_edge_hook(target, source)
        self._device = device
        self._exponents: list[int] = []
        self._values = torch.empty(0, dtype=torch.float32, device="cpu")

    def make_current_factors(self) -> Tensor:
        """Return the factors for the present exponents; a new tensor, as compilers may write into it."""
        exponents = [target.exponent - source.exponent for source, target in self._edges]
        if exponents != self._exponents:
            self._exponents = exponents
            self._values = torch.tensor([2.0**e for e in exponents], dtype=torch.float32, device="cpu").to(self._device)
        return self._values.clone()


def _find_active_backward(scaler: str) -> Backward | None:
    """Return the scaler of that handle, if it differentiates a scaled loss."""
    backward = LIVE_BACKWARDS.get(scaler)
    return backward if backward is not None and backward.active else None


def _compute_edge_factors(scaler: str, edges: str, count: int, device: torch.device) -> Tensor:
    backward = _find_active_backward(scaler)
    if backward is None:
        return torch.ones(count, device=device, dtype=torch.float32)
    known = backward.factors.get((edges, device))
    if known is None:
        known = backward.factors[edges, device] = EdgeFactors(backward, edges, device)
    backward.reached.update(known.sites)
    return known.make_current_factors()


def _observe_gradients(gradients: list[Tensor], scaler: str, site: str, kinds: str) -> None:
    backward = _find_active_backward(scaler)
    if backward is None or not backward.measuring:
        return
    where = backward.sites.open_site(site)
    backward.reached.setdefault(where)
    for kind, gradient in zip(kinds.split(PART), gradients):
        exponent = where.exponent - backward.sites.global_site.exponent if kind.endswith(SHARED_KIND_SUFFIX) else 0
        stored = multiply_by_power(gradient, exponent)
        backward.measurements.add_gradient(where, kind.removesuffix(SHARED_KIND_SUFFIX), stored, None)


compute_edge_factors = define_operator(
    "gradient_factors(str scaler, str edges, int count, Device device) -> Tensor",
    _compute_edge_factors,
    lambda scaler, edges, count, device: torch.empty(count, device=device, dtype=torch.float32),
    host=True,
)
observe_gradients = define_operator(
    "observe_gradients(Tensor[] gradients, str scaler, str site, str kinds) -> ()",
    _observe_gradients,
    lambda *_: None,
    host=True,
)
# Inductor cuts an expression where it reads too much, and with that decides what it computes by vectors and what one by
# one: exp, for instance, in other last bits. A loss's gradient, which much may read, is moved apart from all that.
move_scalar_gradient = define_operator(
    "moved_number(Tensor gradient, Tensor factor) -> Tensor", torch.mul, lambda gradient, _: torch.empty_like(gradient)
)
torch.fx.node.has_side_effect(observe_gradients)


def move_gradients(module: GraphModule, plan: SitePlan, scaler: str) -> None:
    """Write moves between sites, and measurements, into a backward graph."""
    placement = SitePlacement(module, plan)
    edges = placement.list_edges()
    writer = BackwardGraphWriter(module, scaler, placement.list_site_keys(), edges)
    moved = {writer.write_move(edge): edge for edge in edges}
    for key, gradients in placement.list_measured_gradients(moved).items():
        writer.write_measurement(key, gradients)
    module.graph.lint()
    module.recompile()


class BackwardGraphWriter:
    """Writes nodes into a backward graph, with their values in meta."""

    def __init__(self, module: GraphModule, scaler: str, keys: list[str], edges: list[Edge]) -> None:
        self._module = module
        self._scaler = scaler
        pairs = dict.fromkeys((edge.source, edge.target) for edge in edges)
        self._edge_numbers = {pair: i for i, pair in enumerate(pairs)}
        index = {key: str(i) for i, key in enumerate(keys)}
        self._edges = ITEM.join([PART.join(keys), *(PART.join(index[key] for key in pair) for pair in pairs)])
        self._vectors: dict[torch.device, Node] = {}

    def write_call(self, target: Callable, *args: Any) -> Node:
        """Add a call, with its value for fake tensors in meta."""
        node = self._module.graph.call_function(target, args)
        values = torch.fx.node.map_arg(args, lambda x: x.meta["val"])
        node.meta["val"] = target(*values)
        return node

    def write_move(self, edge: Edge) -> Node:
        """Multiply a node by its edge's factor (16-bit ones in float32), and let its readers take the product."""
        node = edge.node
        dtype = node.meta["val"].dtype
        half = dtype in HALF_DTYPES
        cast = torch.ops.prims.convert_element_type.default
        vector = self._get_factor_vector(node)
        with self._module.graph.inserting_before(min(edge.readers)):
            factor = self.write_call(torch.ops.aten.select.int, vector, 0, self._edge_numbers[edge.source, edge.target])
            wide = self.write_call(cast, node, torch.float32) if half else node
            times = torch.ops.aten.mul.Tensor if node.meta["val"].dim() else move_scalar_gradient
            moved = self.write_call(times, wide, factor)
            moved = self.write_call(cast, moved, dtype) if half else moved
        for reader in edge.readers:
            reader.replace_input_with(node, moved)
        return moved

    def write_measurement(self, key: str, gradients: Collection[MeasuredGradient]) -> None:
        """Add a measurement of gradients at a site, with their kinds and whether they have the global exponent."""
        nodes, kinds, shared = zip(*gradients)
        words = PART.join(kind + SHARED_KIND_SUFFIX * s for kind, s in zip(kinds, shared))
        with self._module.graph.inserting_after(max(nodes)):
            self.write_call(observe_gradients, list(nodes), self._scaler, key, words)

    def _get_factor_vector(self, like: Node) -> Node:
        """Return the factors of all edges, on the device of a node."""
        value = like.meta["val"]
        if value.device not in self._vectors:
            first = next(node for node in self._module.graph.nodes if node.op != "placeholder")
            with self._module.graph.inserting_before(first), value.fake_mode:
                args = (self._scaler, self._edges, len(self._edge_numbers), value.device)
                self._vectors[value.device] = self.write_call(compute_edge_factors, *args)
        return self._vectors[value.device]


# Where torch keeps the functions of forward nodes, and those of backward nodes.
_OWN, _FORWARD = "source_fn_stack", "fwd_source_fn_stack"


def name_forward_functions(joint: GraphModule) -> None:
    """Name the forward functions of backward nodes that torch left without, as it does after in-place functions.

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
        elif is_gradient_sum(node):
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


# What autograd calls a graph that is compiled.
_COMPILED_NODE_NAME = "CompiledFunctionBackward"


# the backend ------------------------------------------------------------------------------------------------


def make_backend(backward: Backward, name: str = "inductor") -> Callable[..., Any]:
    """Return a backend of torch.compile for models with a scaler."""
    if name not in _COMPILERS:
        raise ValueError(f"the backend is one of {', '.join(_COMPILERS)}, got {name!r}")
    if backward.format is not None or backward.policy.wants_operands:
        reason = "format= rounds" if backward.format is not None else f"policy {backward.policy.name!r} reads"
        raise NotImplementedError(
            f"{reason} the gradients of every product in models that run uncompiled, and in these alone: leave the "
            "model uncompiled, or take the scaler without format= and with policy='amax'"
        )

    def compile_scaled(module: GraphModule, inputs: Sequence, *, options: dict | None = None, mode: str | None = None):
        warn_of_graph_breaks(inputs, backward)
        join_scaled_sums(module.graph)
        partition = Partitioner(backward.handle, plan_sites(module, inputs, backward))
        remove_output_marks(module, backward.handle)
        return _COMPILERS[name](module, inputs, partition, options, mode)

    return compile_scaled


class Partitioner:
    """Partitions a joint graph as torch does, and moves gradients in its backward graph: a CustomPartitionerFn."""

    def __init__(self, scaler: str, plan: SitePlan, inner: Any = None) -> None:
        self.scaler = scaler
        self.plan = plan
        self.inner = inner

    def __call__(self, module: GraphModule, inputs: Sequence[object], **kwargs: Any) -> tuple[GraphModule, GraphModule]:
        name_forward_functions(module)
        part = self.inner or torch._functorch.partitioners.min_cut_rematerialization_partition
        forward, backward = part(module, inputs, **kwargs)
        move_gradients(backward, self.plan, self.scaler)
        return forward, backward

    def uuid(self) -> tuple:
        """Return the key of this partitioner in torch's caches of graphs."""
        from torch._inductor.custom_graph_pass import get_hash_for_files

        files = (_placement, _functions)
        sources = get_hash_for_files((__file__, *(one.__file__ for one in files)))
        inner = self.inner.uuid() if self.inner else None
        return sources, self.scaler, *self.plan.make_cache_key(), inner


def _compile_by_inductor(
    module: GraphModule, inputs: Sequence, partition: Partitioner, options: dict | None, mode: str | None
):
    from torch._inductor import list_mode_options
    from torch._inductor.compile_fx import compile_fx

    patches = {**list_mode_options(mode or "default"), **(options or {})}
    with partition_graphs_by(partition, patches) as patches:
        return compile_fx(module, inputs, config_patches=patches)


def _compile_by_aot_eager(
    module: GraphModule, inputs: Sequence, partition: Partitioner, options: dict | None, mode: str | None
):
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop

    compiler = aot_autograd(fw_compiler=boxed_nop, partition_fn=partition, keep_inference_input_mutations=True)
    return compiler(module, inputs)


_COMPILERS = {"inductor": _compile_by_inductor, "aot_eager": _compile_by_aot_eager}


# the forward graph ------------------------------------------------------------------------------------------


def remove_output_marks(module: GraphModule, scaler: str) -> None:
    """Remove the marks of this scaler from a graph."""
    for node in list(module.graph.nodes):
        if node.target is mark_scaled_output and node.args[1] == scaler:
            node.replace_all_uses_with(node.args[0])
            module.graph.erase_node(node)
    module.recompile()


def warn_of_graph_breaks(inputs: Sequence, backward: Backward) -> None:
    """Warn where a model's parameters are read outside of its graphs, as sites exist only in graphs."""

    def ends(node: Any) -> bool:
        # Marks are where another model ends that is not compiled, whose parameters have sites.
        return node.name() == _COMPILED_NODE_NAME or backward.sites.global_site in node.metadata

    broken = set()
    for node in list_nodes_behind([x.grad_fn for x in inputs if isinstance(x, Tensor)], ends):
        parameter = getattr(node, "variable", None)
        if isinstance(parameter, Tensor):
            name = find_owning_module(parameter, backward)
            if name is not None:
                broken.add(repr(name))
            elif isinstance(parameter, nn.Parameter) and any(one.is_sharded() for one in backward.names):
                broken.add("modules that fully_shard wraps")  # no module lists its copies
    if broken:
        names = ", ".join(sorted(broken)[:5]) + (" and others" if len(broken) > 5 else "")
        warnings.warn(
            f"torch.compile breaks the model's graph and leaves {names} uncompiled, where all gradients have the "
            "global exponent: torch.compile(..., fullgraph=True) shows why; or leave the model uncompiled, too, which "
            "gives them their own",
            stacklevel=2,
        )


# sites of a forward graph ------------------------------------------------------------------------------------

# The higher-order operator that dynamo makes of torch.utils.checkpoint, by name.
_CHECKPOINT_OPERATOR = "tag_activation_checkpoint"
# That of torch.autograd.Function, by name, and what dynamo calls the functions that its bodies run in.
_CUSTOM, _IN_CUSTOM = "autograd_function_apply", "autograd.function"
_ATTRIBUTE_IN_SOURCE = re.compile(r"_(?:modules|parameters)\['([^']+)'\]|__self__\.(\w+)")
# Dynamo writes `a += b` and `a[i] = b` with functions of Python's operator module.
_IN_PLACE_OPERATORS = {*("iadd", "isub", "imul", "itruediv", "ipow", "ior", "iand", "ixor", "imatmul", "setitem")}


def plan_sites(module: GraphModule, inputs: Sequence, backward: Backward) -> SitePlan:
    """Return the sites of a forward graph's functions, with the keys of the eager front end, and of its parameters."""
    placeholders = module.graph.find_nodes(op="placeholder")
    parameters = {node: x for node, x in zip(placeholders, inputs) if isinstance(x, nn.Parameter)}
    plan = SitePlan(tuple(node in parameters for node in placeholders))
    _SitePlanner(backward, parameters, plan).visit_graph(module)
    for key in dict.fromkeys(plan.site_keys.values()):
        backward.sites.open_site(key)
    for parameter in parameters.values():
        refuse_float16_gradient(parameter)
    return plan


class _SitePlanner:
    """Assigns to every node of a forward graph the site that a region assigns to its function."""

    def __init__(self, backward: Backward, parameters: dict[Node, nn.Parameter], plan: SitePlan) -> None:
        self._plan = plan
        self._parts = {str(key): name for one in backward.names for key, name in one.list_parts_by_id().items()}
        self._parameters = dict(parameters)
        self._owners = {
            x: find_owning_module(x, backward) or _read_owner_from_source(node) or "model"
            for node, x in parameters.items()
        }
        # The site of each node that a gradient flows to; of several results, those of each.
        self._sites: dict[Node, Any] = {}
        self._ranks: dict[str, int] = {}
        self._calls: Counter[str] = Counter()
        self._whole: dict[str, str] = {}
        self._records = True

    def visit_graph(self, module: GraphModule, outer: tuple = ()) -> None:
        """Visit all nodes of a graph, and those of checkpoints' bodies, in the order in which they run."""
        for node in module.graph.nodes:
            stack = node.meta.get("source_fn_stack")
            if stack and outer:
                # All checkpoints have one name there.
                stack = node.meta["source_fn_stack"] = [*outer, stack[-1]]
            if node.target is torch._C._set_grad_enabled:
                self._records = bool(node.args[0])
            elif getattr(node.target, "__name__", "") == _CHECKPOINT_OPERATOR:
                body = getattr(module, node.args[0].target)
                self._sites[node] = self._visit_checkpoint(body, node, tuple(stack or ()))
            elif node.op in ("call_function", "call_method") and stack:
                self._visit_node(node, name_nested_function(stack))

    def _visit_checkpoint(self, body: GraphModule, node: Node, stack: tuple) -> Any:
        """Return the sites of the results of a body that runs again during backward.

        Without a graph, a reentrant one is a custom function, whose gradients have the global exponent where they enter
        and leave it, and a forward pass of its own, in which calls are counted anew.
        """
        is_apart = bool(node.kwargs.get("use_reentrant"))
        for x, y in zip(body.graph.find_nodes(op="placeholder"), node.args[1:]):
            if not isinstance(y, Node):
                continue
            if y in self._parameters:
                self._parameters[x] = self._parameters[y]
            elif self._has_gradient(y):
                self._sites[x] = GLOBAL_KEY if is_apart else self._sites.get(y, GLOBAL_KEY)
        calls = self._calls
        self._calls = Counter() if is_apart else calls
        self.visit_graph(body, stack)
        self._calls = calls
        output = next(one for one in reversed(body.graph.nodes) if one.op == "output")
        given = pytree.tree_leaves(output.args)
        return [GLOBAL_KEY if is_apart else self._sites.get(x, GLOBAL_KEY) for x in given]

    def _visit_node(self, node: Node, path: str) -> None:
        differentiable = [x for x in node.all_input_nodes if self._has_gradient(x)]
        in_place = not isinstance(node.target, str) and node.target.__name__ in _IN_PLACE_OPERATORS
        kind: OperatorKind = "in-place" if in_place else classify_function(node.target)
        if kind == "shape":
            # Only the first argument has a gradient.
            differentiable = [x for x in differentiable if x is node.args[0]]
        if not differentiable or not self._records or kind == "fact":
            return
        site = self._find_site(node, kind, differentiable)
        self._plan.site_keys[path] = site
        if getattr(node.target, "__name__", "") == _CUSTOM:
            # What its backward does is named so, whichever of them it is.
            self._plan.site_keys["/".join([*path.split("/")[:-1], _IN_CUSTOM])] = site
        if kind in ("product", "cell"):
            self._plan.product_paths.add(path)
        elif all(x in self._parameters for x in differentiable):
            self._plan.opening_paths.add(path)
        self._sites[node] = self._pick_result_site(node, site)
        if kind == "in-place" and node.args and isinstance(node.args[0], Node):
            self._sites.setdefault(node.args[0], site)

    def _has_gradient(self, node: Node) -> bool:
        """Return whether gradients flow to a node."""
        if node in self._parameters:
            return self._parameters[node].requires_grad
        tensors = [x for x in pytree.tree_leaves(node.meta.get("example_value")) if isinstance(x, Tensor)]
        # What was written in place has a site that it had not as it was made; whole numbers have no gradient.
        is_known = node in self._sites and any(x.is_floating_point() or x.is_complex() for x in tensors)
        return is_known or any(x.requires_grad for x in tensors)

    def _find_site(self, node: Node, kind: OperatorKind, differentiable: list[Node]) -> str:
        whole = self._find_whole_module_call(node)
        if whole is not None:
            if whole not in self._whole:
                self._whole[whole] = self._number_call(".".join(self._find_module(node)) or "model")
            return self._whole[whole]
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            # A custom function sees gradients of the global exponent.
            return GLOBAL_KEY
        match kind:
            case "product":
                return self._name_site(node, differentiable)
            case "cell":
                leaves = pytree.tree_leaves(node.args[1:2])
                states = [x for x in leaves if isinstance(x, Node) and self._has_gradient(x)]
                site = self._read_site(states[0]) if states and states[0] not in self._parameters else GLOBAL_KEY
                return self._name_site(node, differentiable) if site == GLOBAL_KEY else site
            case "in-place" if node.args and isinstance(node.args[0], Node) and node.args[0] in self._sites:
                return self._read_site(node.args[0])
        sites = [self._read_site(x) for x in differentiable if x not in self._parameters]
        return max(sites, key=lambda key: self._ranks.get(key, -1)) if sites else self._name_site(node, differentiable)

    def _read_site(self, node: Node) -> str:
        """Return the site of a node's gradient; the latest of several results'."""
        site = self._sites.get(node, GLOBAL_KEY)
        if isinstance(site, str):
            return site
        return max(site, key=lambda key: self._ranks.get(key, -1), default=GLOBAL_KEY)

    def _pick_result_site(self, node: Node, site: str) -> str:
        """Return the site of a result: numbers are losses, at the global exponent; one of several has its own."""
        value = node.meta.get("example_value")
        if (
            get_function_name(node.target) == "getitem"
            and isinstance(node.args[0], Node)
            and isinstance(node.args[1], int)
        ):
            several = self._sites.get(node.args[0])
            if isinstance(several, list):
                return several[node.args[1]]
        return GLOBAL_KEY if isinstance(value, Tensor) and value.dim() == 0 and not value._is_view() else site

    def _name_site(self, node: Node, differentiable: Iterable[Node]) -> str:
        """Return the site of this call of a product, or of what reads parameters alone."""
        owner = next((self._owners[self._parameters[x]] for x in differentiable if x in self._parameters), None)
        return self._number_call(owner or ".".join([*self._find_module(node), get_function_name(node.target)]))

    def _number_call(self, key: str) -> str:
        call = self._calls[key]
        self._calls[key] += 1
        key = f"{key}#{call}" if call else key
        self._ranks.setdefault(key, len(self._ranks))
        return key

    def _find_module(self, node: Node) -> list[str]:
        """Return the innermost module with parts that a node runs in."""
        calls = reversed(list(node.meta.get("nn_module_stack") or {}))
        # Dynamo calls a module by its id, and what follows an @ counts its calls.
        names = (self._parts.get(call.partition("@")[0]) for call in calls)
        name = next((name for name in names if name is not None), "")
        return [name] if name else []

    def _find_whole_module_call(self, node: Node) -> str | None:
        """Return the call of a module that the eager front end meets as one product, and dynamo as its parts."""
        calls = (node.meta.get("nn_module_stack") or {}).items()
        return next(
            (call for call, (_, kind) in calls if isinstance(kind, type) and issubclass(kind, SINGLE_SITE_MODULES)),
            None,
        )


def find_owning_module(parameter: Tensor, backward: Backward) -> str | None:
    """Return the module that holds a parameter, where a scaler's model lists it; else None."""
    return next((name for name in (one.find_module_name(parameter) for one in backward.names) if name), None)


def _read_owner_from_source(node: Node) -> str:
    """Return the module that holds the parameter that a graph reads, as far as its source tells."""
    names = _ATTRIBUTE_IN_SOURCE.findall(name_dynamo_source(node.meta["grapharg"].source))
    return ".".join(a or b for a, b in names[:-1])
