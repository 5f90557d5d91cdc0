"""The compiled front end's pass: it gives every gradient of a backward graph a site and moves it where sites meet."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from ._site import GLOBAL

Role = Literal["product", "linear", "part", "widening", "shape", "other"]

# Functions of a gradient and one more operand, by the places of both.
_MATRIX = {
    **dict.fromkeys(("mm", "bmm", "mv", "dot", "vdot", "outer"), (0, 1)),
    **dict.fromkeys(("addmm", "baddbmm", "addmv", "addbmm"), (1, 2)),
}
_RECURRENT = ("mkldnn_rnn_layer_backward", "_cudnn_rnn_backward", "miopen_rnn_backward")
# Linear in all tensors of floating point together: none of them may be a constant but zero.
_MOVES = {
    *("add", "sub", "rsub", "neg", "sum", "mean", "cumsum", "cat", "stack", "where", "masked_fill", "tril", "triu"),
    *(
        "view",
        "_unsafe_view",
        "reshape",
        "_reshape_copy",
        "permute",
        "transpose",
        "t",
        "expand",
        "squeeze",
        "unsqueeze",
    ),
    *("clone", "alias", "detach", "lift_fresh", "lift_fresh_copy", "contiguous", "view_of", "broadcast_in_dim"),
    *("slice", "select", "slice_scatter", "select_scatter", "diagonal", "diagonal_scatter", "unfold", "as_strided"),
    *("as_strided_scatter", "split", "split_with_sizes", "unbind", "flip", "roll", "repeat", "constant_pad_nd"),
    *("index", "_unsafe_index", "index_select", "gather", "index_put", "_unsafe_index_put", "index_add", "scatter"),
    *("scatter_add", "_to_copy", "convert_element_type", "trace", "diag_embed", "im2col", "col2im"),
    *("real", "imag", "complex", "conj", "_conj", "_conj_physical", "resolve_conj", "view_as_real", "view_as_complex"),
    *("_fft_r2c", "_fft_c2r", "_fft_c2c", "view_copy", "permute_copy", "expand_copy", "slice_copy", "select_copy"),
}
# Arguments that may be a number, and then fill in or are added: zero alone is linear.
_FILLS = {
    **dict.fromkeys(("add", "sub", "rsub"), (0, 1)),
    **{"where": (1, 2), "masked_fill": (2,), "constant_pad_nd": (2,), "scatter": (3,)},
}
# a * b + c, by the places of a, b and c.
_FUSED = {"fma": (0, 1, 2), "addcmul": (1, 2, 0)}
_SHAPES = ("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "sym_size", "sym_stride")
_NEW = ("new_empty", "new_zeros", "new_ones", "new_full", "sym_numel", "sym_storage_offset", "new_empty_strided")
_VIEWS = ("view", "permute", "transpose", "t", "expand", "unsqueeze", "squeeze", "reshape", "_unsafe_view", "clone")
_HALF = (torch.float16, torch.bfloat16)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What the forward graph tells of a backward graph.

    Attributes:
        keys: The site of each product of the forward graph, by its path there.
        parameters: Which inputs of the forward graph are parameters.
    """

    keys: Mapping[str, str]
    parameters: tuple[bool, ...]

    @functools.cached_property
    def ranks(self) -> dict[str, int]:
        """The places of sites in the order of the forward pass."""
        return {key: i for i, key in enumerate(dict.fromkeys(self.keys.values()), 1)}

    def rank(self, key: str) -> int:
        """The place of a site; the global one is before all, and then those that the forward pass does not know."""
        return self.ranks.get(key, -1 if key == GLOBAL else 0)


def path_of(stack: Sequence[tuple]) -> str:
    """The name of a function in a graph, after those of the functions whose bodies it is in, such as checkpoints."""
    return "/".join(name for name, _ in stack)


@dataclasses.dataclass
class Crossing:
    """A gradient that moves from one site to another for some of its readers."""

    node: Node
    source: str
    target: str
    readers: list[Node]


@dataclasses.dataclass
class Seen:
    """The gradients at one product: what it reads, passes on, and makes for parameters."""

    key: str
    found: dict[Node, tuple[str, Node, bool]] = dataclasses.field(default_factory=dict)

    def add(self, kind: str, node: Node, shared: bool) -> None:
        """One more, once: another view of it is no other. ``shared``: it has the global exponent."""
        if kind != "received" or not shared:
            self.found.setdefault(_base(node), (kind, node, shared))


class Placement:
    """Sites of all gradients of a backward graph.

    A product's gradients are at the product's site: the one that it reads and those that it makes. Any other function
    that is linear in gradients takes the site that its readers want, so that gradients move as soon as they are made;
    readers that want something else move them again. What enters and leaves, and what reads a gradient in any other
    way, has the global exponent. A cast to a wider dtype comes before a move. Nothing comes between a product and a sum
    that a compiler may compute as one, since the two together round otherwise than one after the other.

    Args:
        module: The graph, with values in its nodes' meta.
        plan: Sites of products.
    """

    def __init__(self, module: GraphModule, plan: Plan) -> None:
        self._plan = plan
        self._output = next(node for node in reversed(module.graph.nodes) if node.op == "output")
        self.gradients: dict[Node, None] = {}
        self.roles: dict[Node, Role] = {}
        self._calls: dict[Node, str] = {}
        self._collect(module.graph.nodes)
        self._products = {add: product for add in self.gradients if (product := self._added(add))}
        self._sums = {product: add for add, product in self._products.items()}
        self._wishes: dict[Node, str | None] = {}
        self._leads: dict[Node, bool] = {}
        for node in reversed(self.gradients):
            self._wish(node)
        self.sites: dict[Node, str] = {}
        for node in self.gradients:
            self.sites[node] = self._site(node)

    def _collect(self, nodes: Iterable[Node]) -> None:
        """Gradients are what follows from tangents."""
        for node in nodes:
            if node.op == "placeholder" and "tangents" in node.name:
                self.gradients[node] = None
            elif node.op not in ("placeholder", "output") and any(x in self.gradients for x in node.all_input_nodes):
                self.roles[node] = role = role_of(node, self.gradients)
                if role == "product":
                    self._calls[node] = self._key(node)
                if role != "shape" and carries(node):
                    self.gradients[node] = None

    def _key(self, node: Node) -> str:
        """The site of a product: that of the forward function it is the derivative of."""
        stack = node.meta.get("fwd_source_fn_stack") or node.meta.get("source_fn_stack") or ()
        paths = (path_of(stack[:end]) for end in range(len(stack), 0, -1))
        return next((self._plan.keys[path] for path in paths if path in self._plan.keys), f"backward.{node.name}")

    def _added(self, add: Node) -> Node | None:
        """The product that a compiler makes one addmm of, with the sum that alone reads it; the last of two."""
        if add.target is not torch.ops.aten.add.Tensor or self.roles[add] != "linear":
            return None
        mm = torch.ops.aten.mm.default
        return next((x for x in reversed(add.all_input_nodes) if x.target is mm and len(x.users) == 1), None)

    def _needed(self, reader: Node) -> str | None:
        """Where a reader wants its gradients; None where it does not mind."""
        if reader.op == "output":
            return None
        if reader in self._products:
            return self._works_at(self._products[reader])
        match self.roles[reader]:
            case "product":
                return self._works_at(reader)
            case "other":
                return GLOBAL
            case "shape" | "widening":
                return None
            case _:
                return self._wishes[reader]

    def _works_at(self, product: Node) -> str:
        """Where a product's gradients are: at the global exponent where it makes parameters' alone and all are wide.

        Its input is moved then, together with whatever makes it, and not its result, which would be read once more.
        """
        value = product.meta["val"]
        own = self._leads[self._sums.get(product, product)] or not isinstance(value, Tensor) or value.dtype in _HALF
        return self._calls[product] if own else GLOBAL

    def _wish(self, node: Node) -> None:
        wishes = [wish for wish in map(self._needed, node.users) if wish is not None]
        self._wishes[node] = max(wishes, key=self._plan.rank) if wishes else None
        self._leads[node] = any(self._goes_on(node, reader) for reader in node.users)

    def _goes_on(self, node: Node, reader: Node) -> bool:
        """Whether a gradient goes to more than parameters through a reader."""
        if reader.op == "output":
            return not self._is_a_parameters(node)
        return self.roles[reader] in ("product", "other") or self._leads.get(reader, False)

    def _is_a_parameters(self, gradient: Node) -> bool:
        """Whether a returned gradient is a parameter's, and not another input's."""
        gradients = pytree.tree_leaves(self._output.args)
        if len(gradients) != len(self._plan.parameters):
            return True
        return self._plan.parameters[gradients.index(gradient)]

    def _site(self, node: Node) -> str:
        role = self.roles.get(node, "other")
        if role == "product":
            return self._works_at(node)
        if node in self._products:
            return self._works_at(self._products[node])
        if role == "other":
            return GLOBAL
        inputs = [self.sites[x] for x in node.all_input_nodes if x in self.gradients]
        if role in ("part", "widening"):
            return inputs[0]
        return self._wishes[node] or max(inputs, key=self._plan.rank)

    def _read_at(self, reader: Node, node: Node) -> str:
        """The site at which a reader takes a gradient."""
        if reader.op == "output":
            return GLOBAL
        match self.roles[reader]:
            case "product":
                return self._works_at(reader)
            case "other":
                return GLOBAL
            case "linear":
                return self.sites[reader]
            case _:
                return self.sites[node]

    def keys(self) -> list[str]:
        """All sites, the global one and then the others in forward's order."""
        return [GLOBAL, *sorted(set(self._calls.values()), key=self._plan.rank)]

    def crossings(self) -> list[Crossing]:
        """Every gradient that moves, once for each site that it moves to."""
        found: dict[tuple[Node, str], Crossing] = {}
        for node, source in self.sites.items():
            for reader in node.users:
                target = self._read_at(reader, node)
                if target != source:
                    found.setdefault((node, target), Crossing(node, source, target, [])).readers.append(reader)
        return list(found.values())

    def seen(self, moved: Collection[Node]) -> list[Seen]:
        """What is worth measuring at each product, once gradients have been moved."""
        found: dict[str, Seen] = {}
        for node, key in self._calls.items():
            seen = found.setdefault(key, Seen(key))
            for x in node.all_input_nodes:
                if x in self.gradients or x in moved:
                    seen.add("received", x, self._works_at(node) == GLOBAL)
            several = isinstance(node.meta["val"], tuple | list)
            for made in [*node.users] if several else [self._sums.get(node, node)]:
                if made in self.gradients and carries(made):
                    seen.add("passed" if self._leads[made] else "weight", made, self.sites[made] == GLOBAL)
        return list(found.values())


def role_of(node: Node, gradients: Mapping[Node, None]) -> Role:
    """What a function is to the gradients among its arguments."""
    if node.target is operator.getitem:
        return "part"
    if not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace not in ("aten", "prims", "mkldnn"):
        return "other"
    name = node.target._opname
    if name in _SHAPES or name in _NEW:
        return "shape"
    if not carries(node):
        return "other"
    if name in _MATRIX:
        return "product" if _one_of(node, gradients, *_MATRIX[name]) else "other"
    if name.endswith(("_backward", "_backward_data")) or name in ("_fused_rms_norm_backward",):
        if not _alone(node, gradients):
            return "other"
        product = name == "convolution_backward" or "attention" in name or name in _RECURRENT
        return "product" if product else "linear"
    if name in _FUSED:
        return "linear" if _one_of(node, gradients, *_FUSED[name][:2]) else "other"
    if name == "mul":
        return "linear" if (node.args[0] in gradients) != (node.args[1] in gradients) else "other"
    if name == "div":
        plain = "rounding_mode" not in node.kwargs or node.kwargs["rounding_mode"] is None
        return "linear" if plain and node.args[0] in gradients and node.args[1] not in gradients else "other"
    if name not in _MOVES or not _moves(node, name, gradients):
        return "other"
    return "widening" if _widens(node, gradients) else "linear"


def carries(node: Node) -> bool:
    """Whether a node has numbers in which a gradient can be."""
    leaves = pytree.tree_leaves(node.meta.get("val"))
    return any(isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex()) for x in leaves)


def _alone(node: Node, gradients: Mapping[Node, None]) -> bool:
    """Whether the first tensor is a gradient and no other."""
    nodes = [x for x in pytree.tree_leaves((node.args, node.kwargs)) if isinstance(x, Node) and _is_tensor(x)]
    return nodes[0] in gradients and not any(x in gradients for x in nodes[1:])


def _one_of(node: Node, gradients: Mapping[Node, None], a: int, b: int) -> bool:
    """Whether one of two factors is a gradient, and whatever is added to their product is a gradient, too, or zero."""
    if (node.args[a] in gradients) == (node.args[b] in gradients):
        return False
    added = [x for i, x in enumerate(node.args) if i not in (a, b) and isinstance(x, Node)]
    return all(x in gradients or _is_zero(x) for x in added if _is_tensor(x))


def _moves(node: Node, name: str, gradients: Mapping[Node, None]) -> bool:
    places = [node.args[i] for i in _FILLS.get(name, ()) if i < len(node.args)]
    if any(isinstance(x, int | float) and x != 0 for x in [*places, node.kwargs.get("value", 0)]):
        return False
    tensors = [
        x for x in pytree.tree_leaves((node.args, node.kwargs)) if isinstance(x, Node) and _is_tensor(x) and carries(x)
    ]
    return all(x in gradients or _is_zero(x) for x in tensors)


def _is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("val"), Tensor)


def _is_zero(node: Node) -> bool:
    """Whether a tensor is made of zeros, whatever reads it in between."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    name = node.target._opname
    if name in ("zeros", "zeros_like", "new_zeros"):
        return True
    if name in ("full", "full_like", "scalar_tensor"):
        value = node.args[0 if name == "scalar_tensor" else 1]
        return isinstance(value, int | float) and value == 0
    one = len(node.all_input_nodes) == 1 and name in _MOVES and name not in _FILLS
    return one and _is_zero(node.all_input_nodes[0])


def _widens(node: Node, gradients: Mapping[Node, None]) -> bool:
    if node.target._opname not in ("_to_copy", "convert_element_type"):
        return False
    narrow = node.all_input_nodes[0].meta["val"].dtype
    return narrow in _HALF and node.meta["val"].dtype not in _HALF


def _base(node: Node) -> Node:
    """What a node is a view of."""
    while isinstance(node.target, torch._ops.OpOverload) and node.target._opname in _VIEWS:
        node = node.all_input_nodes[0]
    return node
