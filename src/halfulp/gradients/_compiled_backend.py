"""The compiled front end: a backend of torch.compile that moves gradients between sites inside the backward graph."""

from __future__ import annotations

import functools
import json
import re
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from .._torch_versions import is_backward, name_dynamo_source, use_graph_partitioner
from ..kernels import define_operator
from ._compiled_placement import HALF_DTYPES, EdgeBetweenSites, SitePlacement, SitePlan, join_function_path
from ._functions import OperatorKind, classify_function, get_function_name
from .eager._attach import mark_scaled_output
from .eager._backward import (
    BACKWARD_HOOKS_BY_HANDLE,
    BackwardHooks,
    list_nodes_reached_by_backward,
    refuse_float16_gradient,
)


@functools.lru_cache(maxsize=256)
def _make_powers_of_two(exponents: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor([2.0**e for e in exponents], dtype=torch.float32, device="cpu").to(device)


def _find_active_backward(scaler_handle: str) -> BackwardHooks | None:
    """Return the hooks of the scaler of that handle, if it differentiates a scaled loss."""
    backward = BACKWARD_HOOKS_BY_HANDLE.get(scaler_handle)
    return backward if backward is not None and backward.is_active else None


def _compute_edge_factors(scaler_handle: str, edges_json: str, count: int, device: torch.device) -> Tensor:
    """Return the factors of a graph's edges at the present exponents; ones where no scaled loss is differentiated."""
    backward = _find_active_backward(scaler_handle)
    if backward is None:
        return torch.ones(count, device=device, dtype=torch.float32)
    if edges_json not in backward.edges_by_json:
        keys, *pairs = json.loads(edges_json)
        sites = [backward.sites.get_or_create_site(key) for key in keys]
        backward.edges_by_json[edges_json] = sites, [(sites[source], sites[target]) for source, target in pairs]
    # The global site comes first.
    (_, *own), found = backward.edges_by_json[edges_json]
    for source, target in found:
        backward.get_edge_hook(target, source)
    backward.reached_sites.update(dict.fromkeys(own))
    # A new tensor, as compilers may write into it.
    return _make_powers_of_two(tuple(target.exponent - source.exponent for source, target in found), device).clone()


def _measure_gradients_of_site(gradients: list[Tensor], scaler_handle: str, site_key: str, joined_kinds: str) -> None:
    """Measure the gradients of a site in an iteration that is measured."""
    backward = _find_active_backward(scaler_handle)
    if backward is not None and backward.is_measuring:
        site = backward.sites.get_or_create_site(site_key)
        backward.reached_sites.setdefault(site)
        for kind, gradient in zip(joined_kinds.split(","), gradients):
            backward.measurements.measure_gradient_on_device(site, kind, gradient, None)


compute_edge_factors = define_operator(
    "gradient_factors(str scaler, str edges, int count, Device device) -> Tensor",
    _compute_edge_factors,
    lambda scaler, edges, count, device: torch.empty(count, device=device, dtype=torch.float32),
    depends_on_host=True,
)
observe_gradients = define_operator(
    "observe_gradients(Tensor[] gradients, str scaler, str site, str kinds) -> ()",
    _measure_gradients_of_site,
    lambda *_: None,
    depends_on_host=True,
)
torch.fx.node.has_side_effect(observe_gradients)


def insert_edges_and_measurements(module: GraphModule, plan: SitePlan, scaler_handle: str) -> None:
    """Write moves between sites, and measurements, into a backward graph, with the values of new nodes in meta."""
    graph, placement = module.graph, SitePlacement(module, plan)
    edges = placement.list_edges_between_sites()
    pairs = list(dict.fromkeys((edge.source_key, edge.target_key) for edge in edges))
    keys = placement.site_keys
    edges_json = json.dumps([keys, *([keys.index(key) for key in pair] for pair in pairs)])
    factor_vectors: dict[torch.device, Node] = {}

    def insert_call_node(target: Callable, *args: Any) -> Node:
        node = graph.call_function(target, args)
        node.meta["val"] = target(*torch.fx.node.map_arg(args, lambda x: x.meta["val"]))
        return node

    def insert_move_nodes(edge: EdgeBetweenSites) -> Node:
        """Multiply a node by its edge's factor (16-bit ones in float32), and let its readers take the product."""
        value = edge.node.meta["val"]
        if value.device not in factor_vectors:
            first = next(node for node in graph.nodes if node.op != "placeholder")
            with graph.inserting_before(first), value.fake_mode:
                args = (scaler_handle, edges_json, len(pairs), value.device)
                factor_vectors[value.device] = insert_call_node(compute_edge_factors, *args)
        half = value.dtype in HALF_DTYPES
        cast = torch.ops.prims.convert_element_type.default
        with graph.inserting_before(min(edge.readers)):
            number = pairs.index((edge.source_key, edge.target_key))
            factor = insert_call_node(torch.ops.aten.select.int, factor_vectors[value.device], 0, number)
            wide = insert_call_node(cast, edge.node, torch.float32) if half else edge.node
            moved = insert_call_node(torch.ops.aten.mul.Tensor, wide, factor)
            moved = insert_call_node(cast, moved, value.dtype) if half else moved
        for reader in edge.readers:
            reader.replace_input_with(edge.node, moved)
        return moved

    moved = {insert_move_nodes(edge): edge for edge in edges}
    for key, gradients in placement.list_gradients_to_measure(moved).items():
        nodes, kinds = zip(*gradients)
        with graph.inserting_after(max(nodes)):
            insert_call_node(observe_gradients, list(nodes), scaler_handle, key, ",".join(kinds))
    graph.lint()
    module.recompile()


def set_forward_functions_of_backward_nodes(joint: GraphModule) -> None:
    """Name the forward functions of backward nodes that older versions of torch left without, by sequence numbers.

    A node of the forward pass has the number of autograd's latest node as it was made.
    """
    nodes = [node for one in joint.modules() if isinstance(one, GraphModule) for node in one.graph.nodes]
    forward: dict[int | None, Any] = {}
    for node in nodes:
        if node.op == "call_function" and not is_backward(node):
            forward.setdefault(node.meta.get("seq_nr"), node.meta.get("source_fn_stack"))
    for node in nodes:
        number = node.meta.get("seq_nr")
        if number is not None and is_backward(node) and not node.meta.get("fwd_source_fn_stack"):
            node.meta["fwd_source_fn_stack"] = forward.get(number)


# the backend ------------------------------------------------------------------------------------------------

_SUPPORTED_COMPILERS = ("inductor", "aot_eager")


def make_torch_compile_backend(backward: BackwardHooks, name: str) -> Callable[..., Any]:
    """Return a backend of torch.compile for models with a scaler."""
    if name not in _SUPPORTED_COMPILERS:
        raise ValueError(f"the backend is one of {', '.join(_SUPPORTED_COMPILERS)}, got {name!r}")
    if backward.format is not None or backward.policy.wants_operands:
        reason = "format= rounds" if backward.format is not None else f"policy {backward.policy.name!r} reads"
        raise NotImplementedError(
            f"{reason} the gradients of every product in models that run uncompiled, and in these alone: leave the "
            "model uncompiled, or take the scaler without format= and with policy='amax'"
        )

    def compile_scaled(
        module: GraphModule, inputs: Sequence, *, options: dict | None = None, mode: str | None = None
    ) -> Any:
        warn_of_graph_breaks(inputs, backward)
        partition = GradientMovingPartitioner(backward.handle, plan_sites(module, inputs, backward))
        # Bodies of higher-order operators, such as checkpoints, are graphs of their own.
        for part in [one for one in module.modules() if isinstance(one, GraphModule)]:
            for node in list(part.graph.nodes):
                if node.target is mark_scaled_output and node.args[1] == backward.handle:
                    node.replace_all_uses_with(node.args[0])
                    part.graph.erase_node(node)
            part.recompile()
        if name == "aot_eager":
            from torch._dynamo.backends.common import aot_autograd
            from torch._dynamo.backends.debugging import boxed_nop

            compiler = aot_autograd(fw_compiler=boxed_nop, partition_fn=partition, keep_inference_input_mutations=True)
            return compiler(module, inputs)
        from torch._inductor import list_mode_options
        from torch._inductor.compile_fx import compile_fx

        patches = {**list_mode_options(mode or "default"), **(options or {})}
        with use_graph_partitioner(partition, patches) as patches:
            return compile_fx(module, inputs, config_patches=patches)

    return compile_scaled


class GradientMovingPartitioner:
    """Partitions a joint graph as torch does, and moves gradients in its backward graph: a CustomPartitionerFn."""

    def __init__(self, scaler_handle: str, plan: SitePlan) -> None:
        self.scaler_handle = scaler_handle
        self.plan = plan
        # What partitions, where `use_graph_partitioner` sets another function than torch's own.
        self.inner_partition: Any = None

    def __call__(self, module: GraphModule, inputs: Sequence[object], **kwargs: Any) -> tuple[GraphModule, GraphModule]:
        set_forward_functions_of_backward_nodes(module)
        part = self.inner_partition or torch._functorch.partitioners.min_cut_rematerialization_partition
        forward, backward = part(module, inputs, **kwargs)
        insert_edges_and_measurements(backward, self.plan, self.scaler_handle)
        return forward, backward

    def uuid(self) -> None:
        """Return no key, which torch asks for even where its caches are off (`use_graph_partitioner`)."""


# the forward graph ------------------------------------------------------------------------------------------


def warn_of_graph_breaks(inputs: Sequence, backward: BackwardHooks) -> None:
    """Warn where a model's parameters are read outside of its graphs, as sites exist only in graphs."""

    def is_search_end(node: Any) -> bool:
        # Marks are where another model ends that is not compiled, whose parameters have sites.
        return node.name() == "CompiledFunctionBackward" or backward.sites.global_site in node.metadata

    broken = set()
    for node in list_nodes_reached_by_backward([x.grad_fn for x in inputs if isinstance(x, Tensor)], is_search_end):
        parameter = getattr(node, "variable", None)
        if isinstance(parameter, Tensor):
            name = find_owning_module_name(parameter, backward)
            if name is not None:
                broken.add(repr(name))
            elif isinstance(parameter, nn.Parameter) and any(one.is_sharded() for one in backward.name_caches):
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
_ACTIVATION_CHECKPOINT_OPERATOR = "tag_activation_checkpoint"
_ATTRIBUTE_IN_SOURCE = re.compile(r"_(?:modules|parameters)\['([^']+)'\]|__self__\.(\w+)")


def plan_sites(module: GraphModule, inputs: Sequence, backward: BackwardHooks) -> SitePlan:
    """Return the sites of a forward graph's products, with the keys of the eager front end, and its parameters."""
    placeholders = module.graph.find_nodes(op="placeholder")
    parameters = {node: x for node, x in zip(placeholders, inputs) if isinstance(x, nn.Parameter)}
    for parameter in parameters.values():
        refuse_float16_gradient(parameter)
    plan = SitePlan(tuple(node in parameters for node in placeholders), {})
    modules = (item for one in backward.name_caches for item in one.list_modules())
    parts = {str(id(module)): name for name, module in modules if next(module.children(), None) is not None}
    owners: dict[Node, str] = {}
    for node, x in parameters.items():
        if x.requires_grad:
            owner = find_owning_module_name(x, backward)
            if owner is None:
                # As far as its source tells.
                names = _ATTRIBUTE_IN_SOURCE.findall(name_dynamo_source(node.meta["grapharg"].source))
                owner = ".".join(a or b for a, b in names[:-1]) or "model"
            owners[node] = owner
    calls: Counter[str] = Counter()

    def name_site(node: Node, kind: OperatorKind) -> str:
        key = next((owners[x] for x in node.all_input_nodes if x in owners), None)
        if key is None:
            # Dynamo calls a module by its id, and what follows an @ counts its calls.
            modules = reversed([one.partition("@")[0] for one in node.meta.get("nn_module_stack") or ()])
            innermost = next((parts[one] for one in modules if one in parts), "")
            key = ".".join(filter(None, (innermost, get_function_name(node.target))))
        # All steps of a recurrent cell share a site.
        call = 0 if kind == "cell" else calls[key]
        calls[key] += 1
        return f"{key}#{call}" if call else key

    def collect_product_sites(graph_module: GraphModule, outer_stack: tuple = ()) -> None:
        """Visit all nodes of a graph, and those of checkpoints' bodies, in the order in which they run."""
        for node in graph_module.graph.nodes:
            stack = node.meta.get("source_fn_stack")
            if stack and outer_stack:
                # All checkpoints have one name there.
                stack = node.meta["source_fn_stack"] = [*outer_stack, stack[-1]]
            if getattr(node.target, "__name__", "") == _ACTIVATION_CHECKPOINT_OPERATOR:
                body = getattr(graph_module, node.args[0].target)
                given = zip(body.graph.find_nodes(op="placeholder"), node.args[1:])
                owners.update((x, owners[y]) for x, y in given if y in owners)
                collect_product_sites(body, tuple(stack or ()))
            elif node.op in ("call_function", "call_method") and stack:
                values = pytree.tree_leaves(node.meta.get("example_value"))
                kind = classify_function(node.target)
                if kind in ("product", "cell") and any(isinstance(x, Tensor) and x.requires_grad for x in values):
                    plan.site_key_by_path[join_function_path(stack)] = name_site(node, kind)

    collect_product_sites(module)
    for key in dict.fromkeys(plan.site_key_by_path.values()):
        backward.sites.get_or_create_site(key)
    return plan


def find_owning_module_name(parameter: Tensor, backward: BackwardHooks) -> str | None:
    """Return the module that holds a parameter, where a scaler's model lists it; else None."""
    names = (one.find_holding_module_name(parameter) for one in backward.name_caches)
    return next((name for name in names if name), None)
