"""Placement: gives every gradient of a backward graph a site, and says which move where sites meet."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from ._site import GLOBAL

# Opening: linear, in the derivative of a function that reads parameters alone, whose gradients have its site.
Role = Literal["product", "opening", "linear", "part", "widening", "shape", "other"]

# Functions of a gradient and one more operand, by the places of both.
MATRIX = {
    **dict.fromkeys(("mm", "bmm", "mv", "dot", "vdot", "outer"), (0, 1)),
    **dict.fromkeys(("addmm", "baddbmm", "addmv", "addbmm"), (1, 2)),
}
_RECURRENT = ("mkldnn_rnn_layer_backward", "_cudnn_rnn_backward", "miopen_rnn_backward")
# Linear in all tensors of floating point together: none of them may be a constant but zero.
_MOVES = {
    *("add", "sub", "rsub", "neg", "sum", "mean", "cumsum", "cat", "stack", "where", "masked_fill", "tril", "triu"),
    *("view", "_unsafe_view", "reshape", "_reshape_copy", "permute", "transpose", "t", "expand", "squeeze"),
    *("unsqueeze", "clone", "alias", "detach", "lift_fresh", "lift_fresh_copy", "contiguous", "view_of"),
    *("broadcast_in_dim", "slice", "select", "slice_scatter", "select_scatter", "diagonal", "diagonal_scatter"),
    *("unfold", "as_strided"),
    *("as_strided_scatter", "split", "split_with_sizes", "unbind", "flip", "roll", "repeat", "constant_pad_nd"),
    *(
        "index",
        "_unsafe_index",
        "index_fill",
        "index_select",
        "gather",
        "index_put",
        "_unsafe_index_put",
        "index_add",
        "scatter",
    ),
    *("scatter_add", "_to_copy", "convert_element_type", "trace", "diag_embed", "im2col", "col2im"),
    *("real", "imag", "complex", "conj", "_conj", "_conj_physical", "resolve_conj", "view_as_real", "view_as_complex"),
    *("_fft_r2c", "_fft_c2r", "_fft_c2c", "view_copy", "permute_copy", "expand_copy", "slice_copy", "select_copy"),
}
# Arguments that may be a number, and then fill in or are added: zero alone is linear.
_FILLS = {
    **dict.fromkeys(("add", "sub", "rsub"), (0, 1)),
    **{"where": (1, 2), "masked_fill": (2,), "constant_pad_nd": (2,), "scatter": (3,), "index_fill": (3,)},
}
# a * b + c, by the places of a, b and c.
_FUSED = {"fma": (0, 1, 2), "addcmul": (1, 2, 0)}
_SHAPES = ("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "sym_size", "sym_stride")
_NEW = ("new_empty", "new_zeros", "new_ones", "new_full", "sym_numel", "sym_storage_offset", "new_empty_strided")
_VIEWS = ("view", "permute", "transpose", "t", "expand", "unsqueeze", "squeeze", "reshape", "_unsafe_view", "clone")
_CASTS = ("_to_copy", "convert_element_type")
HALF = (torch.float16, torch.bfloat16)


def find_role(node: Node, gradients: Mapping[Node, None]) -> Role:
    """Return how a function treats the gradients among its arguments."""
    if node.target is operator.getitem:
        return "part"
    if not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace not in ("aten", "prims", "mkldnn"):
        return "other"
    name = node.target._opname
    if name in _SHAPES or name in _NEW:
        return "shape"
    if not is_floating(node):
        return "other"
    if name in MATRIX:
        return "product" if _is_one_factor(node, gradients, *MATRIX[name]) else "other"
    if name == "_trilinear":
        return "product" if sum(x in gradients for x in node.args[:3]) == 1 else "other"
    if name.endswith(("_backward", "_backward_data")) or name in ("_fused_rms_norm_backward",):
        nodes = [x for x in pytree.tree_leaves((node.args, node.kwargs)) if isinstance(x, Node) and _is_tensor(x)]
        if nodes[0] not in gradients or any(x in gradients for x in nodes[1:]):
            return "other"
        product = name == "convolution_backward" or "attention" in name or name in _RECURRENT
        return "product" if product else "linear"
    if name in _FUSED:
        return "linear" if _is_one_factor(node, gradients, *_FUSED[name][:2]) else "other"
    if name == "mul":
        return "linear" if (node.args[0] in gradients) != (node.args[1] in gradients) else "other"
    if name == "copy":
        return _role_of_copy(node, gradients)
    if name == "div":
        plain = "rounding_mode" not in node.kwargs or node.kwargs["rounding_mode"] is None
        return "linear" if plain and node.args[0] in gradients and node.args[1] not in gradients else "other"
    if name not in _MOVES or not _is_data_movement(node, name, gradients):
        return "other"
    return "widening" if _is_widening(node, gradients) else "linear"


def is_floating(node: Node) -> bool:
    """Return whether a node's value is a floating tensor, which may hold a gradient."""
    leaves = pytree.tree_leaves(node.meta.get("val"))
    return any(isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex()) for x in leaves)


def _is_one_factor(node: Node, gradients: Mapping[Node, None], a: int, b: int) -> bool:
    """Return whether one of two factors is a gradient, and all addends of their product are gradients or zero."""
    if (node.args[a] in gradients) == (node.args[b] in gradients):
        return False
    added = [x for i, x in enumerate(node.args) if i not in (a, b) and isinstance(x, Node)]
    return all(x in gradients or _is_zero(x) for x in added if _is_tensor(x))


def _is_data_movement(node: Node, name: str, gradients: Mapping[Node, None]) -> bool:
    places = [node.args[i] for i in _FILLS.get(name, ()) if i < len(node.args)]
    if any(isinstance(x, int | float) and x != 0 for x in [*places, node.kwargs.get("value", 0)]):
        return False
    tensors = [x for x in node.all_input_nodes if _is_tensor(x) and is_floating(x)]
    return all(x in gradients or _is_zero(x) for x in tensors)


def _role_of_copy(node: Node, gradients: Mapping[Node, None]) -> Role:
    """Return the second argument in the shape of the first."""
    shape, source = node.args[:2]
    assert isinstance(shape, Node)
    assert isinstance(source, Node)
    if _is_zero(source):
        return "shape"
    same = shape.meta["val"].dtype == source.meta["val"].dtype
    return "linear" if source in gradients and same else "other"


def _is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("val"), Tensor)


def _is_zero(node: object) -> bool:
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
        return _is_zero(node.args[1])
    one = len(node.all_input_nodes) == 1 and name in _MOVES and name not in _FILLS
    return one and _is_zero(node.all_input_nodes[0])


def is_narrowing(node: Node) -> bool:
    """Return whether a node casts a wider tensor to float16."""
    if getattr(node.target, "_opname", None) not in _CASTS or node.meta["val"].dtype != torch.float16:
        return False
    return node.all_input_nodes[0].meta["val"].dtype != torch.float16


def _is_widening(node: Node, gradients: Mapping[Node, None]) -> bool:
    if getattr(node.target, "_opname", None) not in _CASTS:
        return False
    narrow = node.all_input_nodes[0].meta["val"].dtype
    return narrow in HALF and node.meta["val"].dtype not in HALF


def find_base(node: Node) -> Node:
    """Return the tensor that a node is a view of."""
    while isinstance(node.target, torch._ops.OpOverload) and node.target._opname in _VIEWS:
        node = node.all_input_nodes[0]
    return node


@dataclasses.dataclass
class Plan:
    """The sites of a forward graph's functions, and what else the pass over its backward graph needs of it.

    Attributes:
        parameters: Which inputs of the forward graph are parameters.
        keys: The site of each function of the forward graph, by its path there.
        products: The paths of those that are products.
        opening: The paths of others that open a site, as they read parameters alone.
        rounds: Whether gradients are rounded to a format of their own.
        repeating: The paths of those that are given one tensor more than once, each of which is read by itself.
        wholes: The calls of modules that the eager front end meets as one function, by the paths of what runs there.
        apart: The paths of bodies whose arguments and results have gradients at the global exponent.
        watches: Whether the policy reads the operands of products.
    """

    parameters: tuple[bool, ...]
    keys: dict[str, str] = dataclasses.field(default_factory=dict)
    products: set[str] = dataclasses.field(default_factory=set)
    opening: set[str] = dataclasses.field(default_factory=set)
    repeating: set[str] = dataclasses.field(default_factory=set)
    wholes: dict[str, str] = dataclasses.field(default_factory=dict)
    apart: set[str] = dataclasses.field(default_factory=set)
    rounds: bool = False
    watches: bool = False

    def make_key(self) -> tuple:
        """Return the cache key: all that a backward graph depends on."""
        listed = (tuple(sorted(paths)) for paths in (self.products, self.opening, self.repeating, self.apart))
        return tuple(self.keys.items()), *listed, tuple(self.wholes.items()), self.parameters, self.rounds, self.watches

    @functools.cached_property
    def ranks(self) -> dict[str, int]:
        """The places of sites in the order of the forward pass."""
        opened = dict.fromkeys(key for key in self.keys.values() if key != GLOBAL)
        return {key: i for i, key in enumerate(opened, 1)}

    def find_rank(self, key: str) -> int:
        """Return the position of a site: the global one first, then those that the forward pass does not have."""
        return -1 if key == GLOBAL else self.ranks.get(key, 0)


def join_path(stack: Sequence[tuple]) -> str:
    """Return the name of a graph's function, behind the names of the functions that it is nested in."""
    return "/".join(name for name, _ in stack)


@dataclasses.dataclass
class Edge:
    """A gradient that moves from one site to another for some of its readers, as a rounded copy where there is one."""

    node: Node
    source: str
    target: str
    readers: list[Node]
    rounded: Node | None = None


@dataclasses.dataclass(frozen=True)
class Product:
    """A gradient times another factor.

    Attributes:
        node: Its function.
        key: Its site.
        shared: Whether it works at the global exponent and not at its site's.
        reads: The gradients among its arguments, as it reads them.
        makes: The gradients that it makes: which, of what kind, and whether they have the global exponent.
    """

    node: Node
    key: str
    shared: bool
    reads: Sequence[Node]
    makes: Sequence[tuple[Node, str, bool]]

    def find_factor(self) -> tuple[Node, Node, str, int] | None:
        """Return a gradient, the other factor, and its form and groups as in `Factor`; None without one."""
        args: Any = self.node.args
        name = getattr(self.node.target, "_opname", None)
        if name in ("mm", "bmm", "addmm", "baddbmm"):
            a, b = (args[i] for i in MATRIX[name])
            return (a, b, "left", 1) if a in self.reads else (b, a, "right", 1)
        if name == "convolution_backward":
            return args[0], args[2], "transposed" if args[7] else "convolution", args[9]
        return None


class Placement:
    """The sites of all gradients of a backward graph.

    A product's gradients are at the product's site: the one that it reads and those that it makes. Any other function
    that is linear in gradients takes the site that its readers want, so that gradients move as soon as they are made;
    readers that want something else move them again. What enters and leaves, and what reads a gradient in any other
    way, has the global exponent. A cast to a wider dtype comes before a move. Nothing comes between a product and a sum
    that a compiler may compute as one, since the two together round otherwise than one after the other.
    """

    def __init__(self, module: GraphModule, plan: Plan) -> None:
        self._plan = plan
        self._output = next(node for node in reversed(module.graph.nodes) if node.op == "output")
        self.gradients: dict[Node, None] = {}
        self.roles: dict[Node, Role] = {}
        # Sums of gradients of one tensor, for which autograd names no forward function.
        self._adds: set[Node] = set()
        self._calls: dict[Node, str] = {}
        self._pinned: dict[Node, str] = {}
        self._collect(module.graph.nodes)
        self._products = {add: product for add in self.gradients if (product := self._find_fused_product(add))}
        self._sums = {product: add for add, product in self._products.items()}
        self._preferred: dict[Node, str | None] = {}
        self._leads: dict[Node, bool] = {}
        for node in reversed(self.gradients):
            self._set_preferred_site(node)
        self.sites: dict[Node, str] = {}
        for node in self.gradients:
            self.sites[node] = self._site(node)

    def _collect(self, nodes: Iterable[Node]) -> None:
        """Find all gradients, which are computed from the tangents, and their roles."""
        for node in nodes:
            if node.op == "placeholder" and "tangents" in node.name:
                self.gradients[node] = None
            elif node.op not in ("placeholder", "output") and any(x in self.gradients for x in node.all_input_nodes):
                self.roles[node] = role = self._role(node)
                adds = node.target is torch.ops.aten.add.Tensor and all(x in self.gradients for x in node.args[:2])
                if adds and self._path(node) is None:
                    self._adds.add(node)
                if role in ("product", "opening"):
                    self._calls[node] = self._key(node)
                elif role == "linear" and self._plan.rounds:
                    path = self._find_one_function(node) if node in self._adds else self._path(node)
                    if path is not None:
                        self._pinned[node] = self._plan.keys[path]
                if role != "shape" and is_floating(node):
                    self.gradients[node] = None

    def _find_one_function(self, add: Node) -> str | None:
        """Return the one function in whose derivative all terms of a sum are computed; None if there are several."""
        made = list(add.all_input_nodes)
        for x in made:
            made += x.all_input_nodes if x in self._adds else ()
        paths = [self._path(x) for x in made if x not in self._adds]
        known = [path for path in paths if path is not None]
        is_one = known == paths and len({self._plan.wholes.get(path, path) for path in known}) == 1
        return known[0] if is_one and known[0] not in self._plan.repeating else None

    def _role(self, node: Node) -> Role:
        role, path = find_role(node, self.gradients), self._path(node)
        if role == "product" and path is not None and path not in self._plan.products:
            # A step of another function's derivative, of which the eager front end sees the whole.
            return "other" if self._plan.keys[path] == GLOBAL else "linear"
        return "opening" if role == "linear" and path in self._plan.opening else role

    def _path(self, node: Node) -> str | None:
        """Return the forward function to whose derivative a node belongs."""
        stack = node.meta.get("fwd_source_fn_stack") or node.meta.get("source_fn_stack") or ()
        paths = (join_path(stack[:end]) for end in range(len(stack), 0, -1))
        return next((path for path in paths if path in self._plan.keys), None)

    def _whole(self, node: Node) -> str | None:
        """Return the function, as the eager front end sees it, to whose derivative a node belongs."""
        path = self._path(node)
        return None if path is None else self._plan.wholes.get(path, path)

    def _is_within(self, node: Node, whole: str) -> bool:
        """Return whether a gradient is made within a function's derivative, and not only added up there."""
        if node not in self.roles:
            return False
        if node in self._adds:
            return any(self._is_within(x, whole) for x in node.all_input_nodes)
        return self._whole(node) == whole

    def list_entering(self, product: Product, moved: Collection[Node]) -> Iterator[tuple[Node, list[Node]]]:
        """Return the gradients on their way into the derivative of the function to which a product belongs.

        With each, what reads it there. Of gradients that such a function makes for itself the eager front end sees
        none; those of a tensor that it reads and gives are two.
        """
        whole, seen = self._whole(product.node), set()
        ahead = [(x, product.node) for x in product.reads]
        while ahead:
            node, reader = ahead.pop()
            if whole is None or not self._is_within(node, whole):
                inside = (x for x in node.users if x is product.node or (whole and self._is_within(x, whole)))
                yield node, [reader] if whole is None else list(inside)
            elif node not in seen:
                seen.add(node)
                ahead += [(x, node) for x in node.all_input_nodes if x in self.gradients or x in moved]

    def _key(self, node: Node) -> str:
        path = self._path(node)
        return f"backward.{node.name}" if path is None else self._plan.keys[path]

    def _find_fused_product(self, add: Node) -> Node | None:
        """Return the product that a compiler may fuse with this sum into one addmm; the last of two."""
        if self._plan.rounds:
            # What is rounded before it is added is computed apart.
            return None
        if add.target is not torch.ops.aten.add.Tensor or self.roles[add] != "linear":
            return None
        mm = torch.ops.aten.mm.default
        return next((x for x in reversed(add.all_input_nodes) if x.target is mm and len(x.users) == 1), None)

    def _find_needed(self, reader: Node) -> str | None:
        """Return the site at which a reader needs its gradients; None if any will do."""
        if reader.op == "output" or self.roles[reader] in ("shape", "widening"):
            return None
        if reader in self._products:
            return self._find_working_site(self._products[reader])
        if reader in self._pinned:
            return self._pinned[reader]
        if self.roles[reader] in ("product", "opening"):
            return self._find_working_site(reader)
        return GLOBAL if self.roles[reader] == "other" else self._preferred[reader]

    def _find_working_site(self, product: Node) -> str:
        """Return the site of a product's gradients; the global one if it makes only parameters' and all are wide.

        Its input is moved then, together with whatever makes it, and not its result, which would be read once more.
        """
        value = product.meta["val"]
        own = self._plan.rounds or not isinstance(value, Tensor) or value.dtype in HALF
        own = own or self._leads[self._sums.get(product, product)]
        return self._calls[product] if own else GLOBAL

    def _find_body(self, node: Node) -> str:
        """Return the body with a path in `Plan.apart` that a gradient is made in; that of a sum is its arguments'."""
        if node in self._adds:
            bodies = {self._find_body(x) for x in node.all_input_nodes}
            return bodies.pop() if len(bodies) == 1 else ""
        path = self._path(node) if self._plan.apart else None
        return max((one for one in self._plan.apart if path and path.startswith(f"{one}/")), key=len, default="")

    def _set_preferred_site(self, node: Node) -> None:
        """Set the site at which a gradient's readers want it: the global one where it enters another body."""
        body = self._find_body(node) if self._plan.apart else ""
        wanted = []
        for reader in node.users:
            site = self._find_needed(reader)
            if site is not None:
                enters = self._plan.apart and reader.op != "output" and self._find_body(reader)
                wanted.append(GLOBAL if enters and body != enters else site)
        self._preferred[node] = max(wanted, key=self._plan.find_rank) if wanted else None
        self._leads[node] = any(self._goes_on(node, reader) for reader in node.users)

    def _goes_on(self, node: Node, reader: Node) -> bool:
        """Return whether a gradient goes to more than parameters through a reader."""
        if reader.op != "output":
            return self.roles[reader] in ("product", "other") or self._leads.get(reader, False)
        gradients = pytree.tree_leaves(self._output.args)
        is_known = len(gradients) == len(self._plan.parameters)
        return is_known and not self._plan.parameters[gradients.index(node)]

    def _site(self, node: Node) -> str:
        role = self.roles.get(node, "other")
        if role in ("product", "opening"):
            return self._find_working_site(node)
        if node in self._products:
            return self._find_working_site(self._products[node])
        if role == "other":
            return GLOBAL
        if node in self._pinned:
            return self._pinned[node]
        inputs = [self.sites[x] for x in node.all_input_nodes if x in self.gradients]
        if role in ("part", "widening"):
            return inputs[0]
        if self._plan.rounds and len(inputs) > 1 and self._preferred[node] is None:
            # A parameter's gradients add up as where they are accumulated: each rounded, at the global exponent.
            return GLOBAL
        if self._is_narrow(node):
            # What is made for parameters, such as a bias, is made of what a product reads.
            inputs += [site for x in node.all_input_nodes if (site := self._preferred.get(x))]
        return self._preferred[node] or max(inputs, key=self._plan.find_rank)

    def _is_narrow(self, node: Node) -> bool:
        """Return whether a narrow format stores a gradient."""
        value = node.meta["val"]
        return self._plan.rounds or (isinstance(value, Tensor) and value.dtype == torch.float16)

    def _read_at(self, reader: Node, node: Node) -> str:
        """Return the site at which a reader takes a gradient."""
        role = "other" if reader.op == "output" else self.roles[reader]
        if role == "other":
            return GLOBAL
        return self.sites[reader if role in ("product", "opening", "linear") else node]

    def list_keys(self) -> list[str]:
        """Return all sites, the global one and then the others in forward order."""
        known = {*self._calls.values(), *self._pinned.values()} - {GLOBAL}
        return [GLOBAL, *sorted(known, key=self._plan.find_rank)]

    def list_edges(self) -> list[Edge]:
        """Return every gradient that moves, once for each site that it moves to."""
        found: dict[tuple[Node, str], Edge] = {}
        for node, source in self.sites.items():
            for reader in node.users:
                target = self._read_at(reader, node)
                if target != source:
                    found.setdefault((node, target), Edge(node, source, target, [])).readers.append(reader)
        return list(found.values())

    def find_stored(self, gradient: Node) -> Node:
        """Return a gradient before it became wider, which it does before it moves."""
        return gradient.all_input_nodes[0] if self.roles.get(gradient) == "widening" else gradient

    def list_dtypes(self) -> dict[str, torch.dtype]:
        """Return the dtype of the gradient that each site's first product reads."""
        dtypes: dict[str, torch.dtype] = {}
        for node, key in self._calls.items():
            read = next(x for x in node.all_input_nodes if x in self.gradients)
            dtypes.setdefault(key, read.meta["val"].dtype)
        return dtypes

    def name_kind(self, gradient: Node) -> str:
        """Return the kind of measurement of a gradient that a site gives: "passed" or "weight"."""
        return "passed" if self._leads[gradient] else "weight"

    def list_products(self, moved: Collection[Node]) -> Iterator[Product]:
        """Yield all products after gradients moved, and what else gives a site its parameters' gradients."""
        for node in self._calls:
            # What leads to the gradient of a parameter that was read without a product is a step on the way.
            if self.roles[node] != "opening" or not any(self.roles.get(x) == "opening" for x in node.users):
                yield self._product(node, moved)

    def _product(self, node: Node, moved: Collection[Node]) -> Product:
        reads = [x for x in node.all_input_nodes if x in self.gradients or x in moved]
        # What comes to a site is rounded, and a product rounds what it reads; no other function does.
        reads = reads if self.roles[node] == "product" else []
        several = isinstance(node.meta["val"], tuple | list)
        made = [*node.users] if several else [self._sums.get(node, node)]
        made = [x for x in made if x in self.gradients and is_floating(x)]
        makes = [(x, self.name_kind(x), self.sites[x] == GLOBAL) for x in made]
        return Product(node, self._calls[node], self._find_working_site(node) == GLOBAL, reads, makes)
