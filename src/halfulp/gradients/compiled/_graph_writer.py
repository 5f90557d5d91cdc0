"""Moves between sites, roundings and measurements: the operators of compiled graphs, and where they are written."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from ...kernels import define_operator
from .._functions import Factor, ProductForm
from .._powers import multiply_by_power
from .._site import GLOBAL, narrow
from ..eager._backward import ALIVE, Backward
from ._placement import HALF, Edge, Placement, Plan, Product, find_base, is_narrowing

# Separates what a string argument of an operator lists; a site's key has neither.
ITEM, PART = "\n", "\t"
# After the kind of a gradient that has the global exponent and not the site's.
SHARED = "*"


class Factors:
    """Holds the factors 2^(target - source) of a graph's edges on a device, and renews them when exponents change."""

    def __init__(self, backward: Backward, edges: str, device: torch.device) -> None:
        keys, *pairs = edges.split(ITEM)
        sites = [backward.sites.open(key) for key in keys.split(PART)]
        self.sites = dict.fromkeys(site for site in sites if site is not backward.sites.global_site)
        self._edges = [tuple(sites[int(i)] for i in pair.split(PART)) for pair in pairs]
        for source, target in self._edges:
            backward.get_edge_hook(target, source)
        self._device = device
        self._exponents: list[int] = []
        self._values = torch.empty(0, dtype=torch.float32, device="cpu")

    def now(self) -> Tensor:
        """Return the factors for the present exponents; a new tensor, as compilers may write into it."""
        exponents = [target.exponent - source.exponent for source, target in self._edges]
        if exponents != self._exponents:
            self._exponents = exponents
            self._values = torch.tensor([2.0**e for e in exponents], dtype=torch.float32, device="cpu").to(self._device)
        return self._values.clone()


def _active(scaler: str) -> Backward | None:
    """Return the scaler of that handle, if it differentiates a scaled loss."""
    backward = ALIVE.get(scaler)
    return backward if backward is not None and backward.active else None


def _factors(scaler: str, edges: str, count: int, device: torch.device) -> Tensor:
    backward = _active(scaler)
    if backward is None:
        return torch.ones(count, device=device, dtype=torch.float32)
    known = backward.factors.get((edges, device))
    if known is None:
        known = backward.factors[edges, device] = Factors(backward, edges, device)
    backward.reached.update(known.sites)
    return known.now()


def _observe(gradients: list[Tensor], scaler: str, site: str, kinds: str) -> None:
    backward = _active(scaler)
    if backward is None or not backward.measuring:
        return
    where = backward.sites.open(site)
    backward.reached.setdefault(where)
    for kind, gradient in zip(kinds.split(PART), gradients):
        exponent = where.exponent - backward.sites.global_site.exponent if kind.endswith(SHARED) else 0
        backward.measurements.add(
            where, kind.removesuffix(SHARED), multiply_by_power(gradient, exponent), backward.format
        )


def _round_tensor(gradient: Tensor, scaler: str) -> Tensor:
    backward = _active(scaler)
    return gradient.clone() if backward is None else backward.round_to_format(gradient)


def _watch(gradient: Tensor, factor: Tensor, scaler: str, site: str, form: ProductForm, groups: int) -> None:
    backward = _active(scaler)
    if backward is not None and backward.measuring:
        where = backward.sites.open(site)
        backward.propose(where, gradient, Factor(factor, form, groups), narrow(gradient.dtype))


def _watch_loss(gradient: Tensor, scaler: str, site: str, stored: torch.dtype) -> None:
    backward = _active(scaler)
    if backward is not None and backward.measuring:
        backward.propose_at_loss(backward.sites.open(site), gradient, narrow(stored))


factors_of_edges = define_operator(
    "gradient_factors(str scaler, str edges, int count, Device device) -> Tensor",
    _factors,
    lambda scaler, edges, count, device: torch.empty(count, device=device, dtype=torch.float32),
    host=True,
)
observe_gradients = define_operator(
    "observe_gradients(Tensor[] gradients, str scaler, str site, str kinds) -> ()", _observe, lambda *_: None, host=True
)
round_gradient = define_operator(
    "round_gradient(Tensor gradient, str scaler) -> Tensor", _round_tensor, lambda x, _: torch.empty_like(x), host=True
)
watch_operands = define_operator(
    "watch_operands(Tensor gradient, Tensor factor, str scaler, str site, str form, int groups) -> ()",
    _watch,
    lambda *_: None,
    host=True,
)
watch_loss = define_operator(
    "watch_loss(Tensor gradient, str scaler, str site, ScalarType stored) -> ()",
    _watch_loss,
    lambda *_: None,
    host=True,
)
# Inductor cuts an expression where it reads too much, and with that decides what it computes by vectors and what one by
# one: exp, for instance, in other last bits. A loss's gradient, which much may read, is moved apart from all that.
move_number = define_operator(
    "moved_number(Tensor gradient, Tensor factor) -> Tensor", torch.mul, lambda gradient, _: torch.empty_like(gradient)
)
for _operator in (observe_gradients, watch_operands, watch_loss):
    torch.fx.node.has_side_effect(_operator)


def move_gradients(module: GraphModule, plan: Plan, scaler: str) -> None:
    """Write moves between sites, roundings and measurements into a backward graph."""
    placement = Placement(module, plan)
    edges = placement.list_edges()
    writer = Writer(module, scaler, placement.list_keys(), edges)
    if plan.watches:
        dtypes = placement.list_dtypes()
        for edge in edges:
            if edge.source == GLOBAL and edge.target in dtypes:
                writer.watch_loss(edge, dtypes[edge.target])
    for edge in edges:
        if plan.rounds and edge.source != GLOBAL:
            edge.rounded = writer.copy_rounded(edge)
    moved = {writer.move(edge): edge for edge in edges}
    products = placement.list_products(moved)
    watching = {product.node: writer.watch(product) for product in _select_watched(products)} if plan.watches else {}
    entering = {one.node: list(placement.list_entering(one, moved)) for one in products} if plan.rounds else {}
    final = _round(writer, moved, entering, watching) if plan.rounds else {}
    for key, gradients in _find_limiting(placement, products, moved, entering, plan.rounds).items():
        writer.observe(key, [(final.get(node, node), kind, shared) for node, kind, shared in gradients])
    module.graph.lint()
    module.recompile()


def _select_watched(products: Iterable[Product]) -> Iterator[Product]:
    """Yield the products that pass gradients on; for a site without one, the first that makes parameters' gradients."""
    by_key: dict[str, list[Product]] = {}
    for product in products:
        by_key.setdefault(product.key, []).append(product)
    for those in by_key.values():
        yield from [product for product in those if product.is_passing] or those[:1]


# By the node of a product, the gradients that enter its function's derivative, and what reads each there.
Entering = dict[Node, list[tuple[Node, list[Node]]]]


def _round(
    writer: Writer, moved: dict[Node, Edge], entering: Entering, watching: dict[Node, Node | None]
) -> dict[Node, Node]:
    """Write roundings of gradients that arrive at a site or enter a product; return what each one becomes.

    What shows the policy a product's factors reads what the product does.
    """
    final = {node: writer.round(node) for node, edge in moved.items() if edge.target != GLOBAL}
    for product, pairs in entering.items():
        watch = watching.get(product)
        for node, readers in pairs:
            if node not in final:
                final[node] = writer.round(node, [])
            for reader in readers if watch is None else (*readers, watch):
                reader.replace_input_with(node, final[node])
    return final


def _find_limiting(
    placement: Placement,
    products: Iterable[Product],
    moved: dict[Node, Edge],
    entering: Entering,
    rounds: bool,
) -> dict[str, list[tuple[Node, str, bool]]]:
    """Return the gradients to measure at each site: all that may overflow there, without views of the same.

    That is what its products read and make and, in a narrow format, what comes to it, becomes narrow there or leaves
    it, between which and its products other functions may lie.
    """
    found: dict[str, dict[Node, tuple[Node, str, bool]]] = {}

    def add(key: str, node: Node, kind: str, shared: bool = False) -> None:
        found.setdefault(key, {}).setdefault(find_base(node), (node, kind, shared))

    def narrow(node: Node) -> bool:
        return rounds or node.meta["val"].dtype == torch.float16

    for product in products:
        # What is rounded is measured as it leaves its site.
        for gradient in (
            product.list_gradients() if not rounds else ((x, "received", False) for x, _ in entering[product.node])
        ):
            add(product.key, *gradient)
    for node, edge in moved.items():
        if edge.target != GLOBAL and narrow(node):
            add(edge.target, node, "received")
        left = placement.find_stored(edge.node)
        if edge.source != GLOBAL and narrow(left):
            add(edge.source, edge.rounded or left, placement.name_kind(left))
    for node, key in placement.sites.items():
        if key != GLOBAL and is_narrowing(node):
            # It was wide when it came to the site.
            add(key, node, "received")
    return {key: list(gradients.values()) for key, gradients in found.items()}


class Writer:
    """Writes nodes into a backward graph, with their values in meta."""

    def __init__(self, module: GraphModule, scaler: str, keys: list[str], edges: list[Edge]) -> None:
        self._module = module
        self._scaler = scaler
        pairs = dict.fromkeys((edge.source, edge.target) for edge in edges)
        self._edge_numbers = {pair: i for i, pair in enumerate(pairs)}
        index = {key: str(i) for i, key in enumerate(keys)}
        self._edges = ITEM.join([PART.join(keys), *(PART.join(index[key] for key in pair) for pair in pairs)])
        self._vectors: dict[torch.device, Node] = {}

    def write(self, target: Callable, *args: Any) -> Node:
        """Add a call, with its value for fake tensors in meta."""
        node = self._module.graph.call_function(target, args)
        values = torch.fx.node.map_arg(args, lambda x: x.meta["val"])
        node.meta["val"] = target(*values)
        return node

    def move(self, edge: Edge) -> Node:
        """Multiply a node by its edge's factor (16-bit ones in float32), and let its readers take the product."""
        node = edge.node
        dtype = node.meta["val"].dtype
        half = dtype in HALF
        cast = torch.ops.prims.convert_element_type.default
        vector = self._vector(node)
        with self._module.graph.inserting_before(min(edge.readers)):
            factor = self.write(torch.ops.aten.select.int, vector, 0, self._edge_numbers[edge.source, edge.target])
            moves = edge.rounded or node
            wide = self.write(cast, moves, torch.float32) if half else moves
            times = torch.ops.aten.mul.Tensor if node.meta["val"].dim() else move_number
            moved = self.write(times, wide, factor)
            moved = self.write(cast, moved, dtype) if half else moved
        for reader in edge.readers:
            reader.replace_input_with(node, moved)
        return moved

    def copy_rounded(self, edge: Edge) -> Node:
        """Return a copy of the moving gradient, rounded to the scaler's format, for this edge alone."""
        with self._module.graph.inserting_before(min(edge.readers)):
            return self.write(round_gradient, edge.node, self._scaler)

    def round(self, node: Node, readers: Collection[Node] | None = None) -> Node:
        """Round a node to the scaler's format, for all its readers or those that are given."""
        with self._module.graph.inserting_after(node):
            result = self.write(round_gradient, node, self._scaler)
        taken = list(node.users) if readers is None else readers
        node.replace_all_uses_with(result, delete_user_cb=lambda reader: reader is not result and reader in taken)
        return result

    def observe(self, key: str, gradients: Collection[tuple[Node, str, bool]]) -> None:
        """Add a measurement of gradients at a site, with their kinds and whether they have the global exponent."""
        nodes, kinds, shared = zip(*gradients)
        words = PART.join(kind + SHARED * s for kind, s in zip(kinds, shared))
        with self._module.graph.inserting_after(max(nodes)):
            self.write(observe_gradients, list(nodes), self._scaler, key, words)

    def watch(self, product: Product) -> Node | None:
        """Add a call that shows the policy both factors of a product; None where these have no `Factor`."""
        factor = product.find_factor()
        if factor is None:
            return None
        gradient, other, form, groups = factor
        with self._module.graph.inserting_before(product.node):
            return self.write(watch_operands, gradient, other, self._scaler, product.key, form, groups)

    def watch_loss(self, edge: Edge, stored: torch.dtype) -> None:
        """Add a call that shows the policy a gradient at the global exponent, before it moves to a site."""
        with self._module.graph.inserting_before(min(edge.readers)):
            self.write(watch_loss, edge.node, self._scaler, edge.target, stored)

    def _vector(self, like: Node) -> Node:
        """Return the factors of all edges, on the device of a node."""
        value = like.meta["val"]
        if value.device not in self._vectors:
            first = next(node for node in self._module.graph.nodes if node.op != "placeholder")
            with self._module.graph.inserting_before(first), value.fake_mode:
                args = (self._scaler, self._edges, len(self._edge_numbers), value.device)
                self._vectors[value.device] = self.write(factors_of_edges, *args)
        return self._vectors[value.device]
