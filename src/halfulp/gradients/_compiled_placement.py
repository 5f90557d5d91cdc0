"""The placement gives every gradient of a backward graph a site, and says which move where sites meet."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple, cast

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from ._site import GLOBAL_SITE_KEY

GradientUse = Literal["product", "linear", "part", "widening", "shape", "other"]

# Functions of a gradient and one more operand, by the places of both.
_FACTOR_POSITIONS_BY_PRODUCT = {
    **dict.fromkeys(("mm", "bmm", "mv", "dot", "vdot", "outer"), (0, 1)),
    **dict.fromkeys(("addmm", "baddbmm", "addmv", "addbmm"), (1, 2)),
}
_RECURRENT_BACKWARD_NAMES = ("mkldnn_rnn_layer_backward", "_cudnn_rnn_backward", "miopen_rnn_backward")
# Linear in all tensors of floating point together: none of them may be a constant but zero.
_LINEAR_OPERATOR_NAMES = {
    *("add", "sub", "rsub", "neg", "sum", "mean", "cumsum", "cat", "stack", "where", "masked_fill", "tril", "triu"),
    *("view", "_unsafe_view", "reshape", "_reshape_copy", "permute", "transpose", "t", "expand", "squeeze"),
    *("unsqueeze", "clone", "alias", "detach", "lift_fresh", "lift_fresh_copy", "contiguous", "view_of"),
    *("broadcast_in_dim", "slice", "select", "slice_scatter", "select_scatter", "diagonal", "diagonal_scatter"),
    *("unfold", "as_strided", "as_strided_scatter"),
    *("split", "split_with_sizes", "unbind", "flip", "roll", "repeat", "constant_pad_nd"),
    *("index", "_unsafe_index", "index_fill", "index_select", "gather", "index_put", "_unsafe_index_put"),
    *("index_add", "scatter"),
    *("scatter_add", "_to_copy", "convert_element_type", "trace", "diag_embed", "im2col", "col2im"),
    *("real", "imag", "complex", "conj", "_conj", "_conj_physical", "resolve_conj", "view_as_real", "view_as_complex"),
    *("_fft_r2c", "_fft_c2r", "_fft_c2c", "view_copy", "permute_copy", "expand_copy", "slice_copy", "select_copy"),
}
# Arguments that may be a number, and then fill in or are added: zero alone is linear.
_LINEAR_ONLY_IF_ZERO_POSITIONS_BY_OPERATOR = {
    **dict.fromkeys(("add", "sub", "rsub"), (0, 1)),
    **{"where": (1, 2), "masked_fill": (2,), "constant_pad_nd": (2,), "scatter": (3,), "index_fill": (3,)},
}
# a * b, or a * b + c, by the places of a and b.
_FACTOR_POSITIONS_BY_MULTIPLY_ADD = {"mul": (0, 1), "fma": (0, 1), "addcmul": (1, 2)}
# Of a gradient's shape alone.
_SHAPE_READING_OPERATOR_NAMES = {
    *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "sym_size", "sym_stride"),
    *("new_empty", "new_zeros", "new_ones", "new_full", "sym_numel", "sym_storage_offset", "new_empty_strided"),
}
_VIEW_OPERATOR_NAMES = {
    *("view", "permute", "transpose", "t", "expand", "unsqueeze", "squeeze", "reshape", "_unsafe_view", "clone")
}
_CAST_OPERATOR_NAMES = ("_to_copy", "convert_element_type")
HALF_DTYPES = (torch.float16, torch.bfloat16)


def classify_gradient_use(node: Node, gradients: Mapping[Node, None]) -> GradientUse:
    """Return how a function treats the gradients among its arguments."""
    if node.target is operator.getitem:
        return "part"
    if not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace not in ("aten", "prims", "mkldnn"):
        return "other"
    name = node.target._opname
    if name in _SHAPE_READING_OPERATOR_NAMES:
        return "shape"
    if not is_floating_tensor(node):
        return "other"
    if name in _FACTOR_POSITIONS_BY_PRODUCT:
        return "product" if _is_linear_product(node, gradients, *_FACTOR_POSITIONS_BY_PRODUCT[name]) else "other"
    if name == "_trilinear":
        return "product" if sum(x in gradients for x in node.args[:3]) == 1 else "other"
    if name.endswith(("_backward", "_backward_data")) or name in ("_fused_rms_norm_backward",):
        nodes = [x for x in pytree.tree_leaves((node.args, node.kwargs)) if isinstance(x, Node) and _is_tensor_node(x)]
        if nodes[0] not in gradients or any(x in gradients for x in nodes[1:]):
            return "other"
        product = name == "convolution_backward" or "attention" in name or name in _RECURRENT_BACKWARD_NAMES
        return "product" if product else "linear"
    if name in _FACTOR_POSITIONS_BY_MULTIPLY_ADD:
        positions = _FACTOR_POSITIONS_BY_MULTIPLY_ADD[name]
        return "linear" if _is_linear_product(node, gradients, *positions) else "other"
    if name == "copy":
        # The second argument in the shape of the first.
        shape, source = cast(tuple[Node, Node], node.args[:2])
        if _is_made_of_zeros(source):
            return "shape"
        return "linear" if source in gradients and shape.meta["val"].dtype == source.meta["val"].dtype else "other"
    if name == "div":
        plain = node.kwargs.get("rounding_mode") is None
        return "linear" if plain and node.args[0] in gradients and node.args[1] not in gradients else "other"
    if name not in _LINEAR_OPERATOR_NAMES:
        return "other"
    fill_values = [node.args[i] for i in _LINEAR_ONLY_IF_ZERO_POSITIONS_BY_OPERATOR.get(name, ()) if i < len(node.args)]
    fills = any(isinstance(x, int | float) and x != 0 for x in [*fill_values, node.kwargs.get("value", 0)])
    tensors = [x for x in node.all_input_nodes if _is_tensor_node(x) and is_floating_tensor(x)]
    only_gradients = all(x in gradients or _is_made_of_zeros(x) for x in tensors)
    if fills or not only_gradients:
        return "other"
    widens = name in _CAST_OPERATOR_NAMES and node.all_input_nodes[0].meta["val"].dtype in HALF_DTYPES
    return "widening" if widens and node.meta["val"].dtype not in HALF_DTYPES else "linear"


def is_floating_tensor(node: Node) -> bool:
    """Return whether a node's value is a floating tensor, which may hold a gradient."""
    leaves = pytree.tree_leaves(node.meta.get("val"))
    return any(isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex()) for x in leaves)


def _is_linear_product(node: Node, gradients: Mapping[Node, None], first_position: int, second_position: int) -> bool:
    """Return whether one of two factors is a gradient, and all addends of their product are gradients or zero."""
    if (node.args[first_position] in gradients) == (node.args[second_position] in gradients):
        return False
    added = [x for i, x in enumerate(node.args) if i not in (first_position, second_position) and isinstance(x, Node)]
    return all(x in gradients or _is_made_of_zeros(x) for x in added if _is_tensor_node(x))


def _is_tensor_node(node: Node) -> bool:
    return isinstance(node.meta.get("val"), Tensor)


def _is_made_of_zeros(node: object) -> bool:
    """Return whether a tensor is made of zeros, possibly through views and copies."""
    if not isinstance(node, Node) or not isinstance(node.target, torch._ops.OpOverload):
        return False
    name = node.target._opname
    if name in ("zeros", "zeros_like", "new_zeros"):
        return True
    if name in ("full", "full_like", "scalar_tensor"):
        value = node.args[0 if name == "scalar_tensor" else 1]
        return isinstance(value, int | float) and value == 0
    if name == "copy":
        return _is_made_of_zeros(node.args[1])
    one = (
        len(node.all_input_nodes) == 1
        and name in _LINEAR_OPERATOR_NAMES
        and name not in _LINEAR_ONLY_IF_ZERO_POSITIONS_BY_OPERATOR
    )
    return one and _is_made_of_zeros(node.all_input_nodes[0])


def _is_float16(node: Node) -> bool:
    """Return whether a node's value is a float16 tensor."""
    value = node.meta["val"]
    return isinstance(value, Tensor) and value.dtype == torch.float16


class SitePlan(NamedTuple):
    """The sites of a forward graph's products, by their paths there, and which of its inputs are parameters."""

    is_parameter_by_input: tuple[bool, ...]
    site_key_by_path: dict[str, str]


def join_function_path(stack: Sequence[tuple]) -> str:
    """Return the name of a graph's function, behind the names of the functions that it is nested in."""
    return "/".join(name for name, _ in stack)


@dataclasses.dataclass
class EdgeBetweenSites:
    """A gradient that moves from one site to another for some of its readers."""

    node: Node
    source_key: str
    target_key: str
    readers: list[Node]


# A gradient and its kind.
MeasuredGradient = tuple[Node, str]


class SitePlacement:
    """The sites of all gradients of a backward graph.

    A product's gradients are at the product's site: the one that it reads and those that it makes. Any other function
    that is linear in gradients takes the site that its readers want, so that gradients move as soon as they are made;
    readers that want something else move them again. What enters and leaves, and what reads a gradient in any other
    way, has the global exponent. A cast to a wider dtype comes before a move. A compiler fuses no product with a sum
    behind a move, and makes such sums as eager does; those that it fuses in the plain graph may differ in the last bit.
    """

    def __init__(self, module: GraphModule, plan: SitePlan) -> None:
        self._plan = plan
        self.gradients: dict[Node, None] = {}
        self._uses: dict[Node, GradientUse] = {}
        self._product_keys: dict[Node, str] = {}
        self._collect_gradients(module.graph.nodes)
        # In the order of the forward pass: the global site first, then those that it does not have.
        ranks = {key: i for i, key in enumerate(dict.fromkeys(plan.site_key_by_path.values()), 1)}
        ranks[GLOBAL_SITE_KEY] = -1
        self._get_rank = lambda key: ranks.get(key, 0)
        # A module may be called "global", too.
        self.site_keys = sorted(dict.fromkeys([GLOBAL_SITE_KEY, *self._product_keys.values()]), key=self._get_rank)
        output = next(node for node in reversed(module.graph.nodes) if node.op == "output")
        made = pytree.tree_leaves(output.args)
        # Which outputs are gradients of parameters, by the first place of each; of some graphs that is not known.
        is_known = len(made) == len(plan.is_parameter_by_input)
        is_of_parameter = dict(zip(reversed(made), reversed(plan.is_parameter_by_input)))
        self._leads_beyond_parameters: dict[Node, bool] = {}
        self._preferred_keys: dict[Node, str | None] = {}
        for node in reversed(self.gradients):
            wanted = [site for reader in node.users if (site := self._find_site_needed_by_reader(reader)) is not None]
            self._preferred_keys[node] = max(wanted, key=self._get_rank) if wanted else None
            self._leads_beyond_parameters[node] = any(
                is_known and not is_of_parameter[node]
                if reader is output
                else self._uses[reader] in ("product", "other") or self._leads_beyond_parameters.get(reader, False)
                for reader in node.users
            )
        self.node_site_keys: dict[Node, str] = {}
        for node in self.gradients:
            self.node_site_keys[node] = self._find_site(node)

    def _collect_gradients(self, nodes: Iterable[Node]) -> None:
        """Find all gradients, which are computed from the tangents, their uses, and the sites of products."""
        for node in nodes:
            if node.op == "placeholder" and "tangents" in node.name:
                self.gradients[node] = None
            elif node.op not in ("placeholder", "output") and any(x in self.gradients for x in node.all_input_nodes):
                use = self._uses[node] = classify_gradient_use(node, self.gradients)
                if use == "product":
                    # That of the forward product to whose derivative it belongs, or its own.
                    stack = node.meta.get("fwd_source_fn_stack") or node.meta.get("source_fn_stack") or ()
                    paths = (join_function_path(stack[:end]) for end in range(len(stack), 0, -1))
                    keys = (self._plan.site_key_by_path[path] for path in paths if path in self._plan.site_key_by_path)
                    self._product_keys[node] = next(keys, f"backward.{node.name}")
                if use != "shape" and is_floating_tensor(node):
                    self.gradients[node] = None

    def _find_site_needed_by_reader(self, reader: Node) -> str | None:
        """Return the site at which a reader needs its gradients; None if any will do."""
        if reader.op == "output" or self._uses[reader] in ("shape", "widening"):
            return None
        if self._uses[reader] == "product":
            return self._product_keys[reader]
        return GLOBAL_SITE_KEY if self._uses[reader] == "other" else self._preferred_keys[reader]

    def _find_site(self, node: Node) -> str:
        """Return the site at which a gradient is made."""
        use = self._uses.get(node, "other")
        if use == "product":
            return self._product_keys[node]
        if use == "other":
            return GLOBAL_SITE_KEY
        inputs = [self.node_site_keys[x] for x in node.all_input_nodes if x in self.gradients]
        if use in ("part", "widening"):
            return inputs[0]
        if _is_float16(node):
            # What is made for parameters, such as a bias, is made of what a product reads.
            inputs += [site for x in node.all_input_nodes if (site := self._preferred_keys.get(x))]
        return self._preferred_keys[node] or max(inputs, key=self._get_rank)

    def list_edges_between_sites(self) -> list[EdgeBetweenSites]:
        """Return every gradient that moves, once for each site that it moves to."""
        found: dict[tuple[Node, str], EdgeBetweenSites] = {}
        for node, source in self.node_site_keys.items():
            for reader in node.users:
                use = "other" if reader.op == "output" else self._uses[reader]
                owner = reader if use in ("product", "linear") else node
                target = GLOBAL_SITE_KEY if use == "other" else self.node_site_keys[owner]
                if target != source:
                    found.setdefault((node, target), EdgeBetweenSites(node, source, target, [])).readers.append(reader)
        return list(found.values())

    def list_gradients_to_measure(self, moved: Mapping[Node, EdgeBetweenSites]) -> dict[str, list[MeasuredGradient]]:
        """Return, by site, the gradients to measure: all that may overflow there, each tensor once.

        That is what its products read and make and, in float16, what comes to it, becomes narrow there or leaves it.
        """
        found: dict[str, dict[Node, MeasuredGradient]] = {}

        def add_gradient(key: str, node: Node, kind: str) -> None:
            viewed = node
            while isinstance(viewed.target, torch._ops.OpOverload) and viewed.target._opname in _VIEW_OPERATOR_NAMES:
                viewed = viewed.all_input_nodes[0]
            found.setdefault(key, {}).setdefault(viewed, (node, kind))

        def name_gradient_kind(node: Node) -> str:
            return "passed" if self._leads_beyond_parameters[node] else "weight"

        for node, key in self._product_keys.items():
            for x in node.all_input_nodes:
                if x in self.gradients or x in moved:
                    add_gradient(key, x, "received")
            several = isinstance(node.meta["val"], tuple | list)
            for x in list(node.users) if several else [node]:
                if x in self.gradients and is_floating_tensor(x):
                    add_gradient(key, x, name_gradient_kind(x))
        for node, edge in moved.items():
            if edge.target_key != GLOBAL_SITE_KEY and _is_float16(node):
                add_gradient(edge.target_key, node, "received")
            # Before it became wider, which it does before it moves.
            left = edge.node.all_input_nodes[0] if self._uses.get(edge.node) == "widening" else edge.node
            if edge.source_key != GLOBAL_SITE_KEY and _is_float16(left):
                add_gradient(edge.source_key, left, name_gradient_kind(left))
        for node, key in self.node_site_keys.items():
            narrows = _is_float16(node) and getattr(node.target, "_opname", None) in _CAST_OPERATOR_NAMES
            if key != GLOBAL_SITE_KEY and narrows and not _is_float16(node.all_input_nodes[0]):
                # It was wide when it came to the site.
                add_gradient(key, node, "received")
        return {key: list(gradients.values()) for key, gradients in found.items()}
