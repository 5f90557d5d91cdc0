"""Sites of a forward graph that dynamo captured: those that the eager front end opens as the model runs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from ..._torch_versions import name_of_source
from .._products import OperatorKind, kind_of, name_of
from .._site import GLOBAL
from ..eager._backward import Backward
from ._placement import Plan, path_of

# The higher-order operator that dynamo makes of torch.utils.checkpoint, by name.
_CHECKPOINT = "tag_activation_checkpoint"
# That of torch.autograd.Function, by name, and what dynamo calls the functions that its bodies run in.
_CUSTOM, _IN_CUSTOM = "autograd_function_apply", "autograd.function"
_ATTRIBUTE = re.compile(r"_(?:modules|parameters)\['([^']+)'\]|__self__\.(\w+)")
# Dynamo writes `a += b` and `a[i] = b` with functions of Python's operator module.
_WRITES = {*("iadd", "isub", "imul", "itruediv", "ipow", "ior", "iand", "ixor", "imatmul", "setitem")}
# Functions of Python that the eager front end meets as one product, and dynamo as their parts.
_WHOLE = (nn.MultiheadAttention,)


def plan_sites(module: GraphModule, inputs: Sequence, backward: Backward) -> Plan:
    """The sites of a forward graph's functions, with the keys of the eager front end, and of its parameters."""
    placeholders = module.graph.find_nodes(op="placeholder")
    parameters = {node: x for node, x in zip(placeholders, inputs) if isinstance(x, nn.Parameter)}
    walk = _Walk(backward, parameters)
    walk.run(module)
    for key in dict.fromkeys(walk.keys.values()):
        backward.sites.open(key)
    for parameter in parameters.values():
        site = walk.read_at.get(parameter, GLOBAL)
        backward.note_read(parameter, backward.sites.global_site if site == GLOBAL else backward.sites.open(site))
    return Plan(
        walk.keys,
        tuple(node in parameters for node in placeholders),
        frozenset(walk.products),
        frozenset(walk.opening),
        frozenset(walk.repeating),
        walk.wholes,
        frozenset(walk.apart),
        rounds=backward.format is not None,
        watches=backward.policy.wants_operands,
    )


class _Walk:
    """Gives every node of a forward graph the site that a region gives its function."""

    def __init__(self, backward: Backward, parameters: dict[Node, nn.Parameter]) -> None:
        self.keys: dict[str, str] = {}
        self.products: list[str] = []
        self.opening: list[str] = []
        self.repeating: list[str] = []
        self.wholes: dict[str, str] = {}
        self.apart: list[str] = []
        self.read_at: dict[nn.Parameter, str] = {}
        self._parts = {str(key): name for one in backward.names for key, name in one.parts().items()}
        self._parameters = dict(parameters)
        self._owners = {x: owner(node, x, backward) for node, x in parameters.items()}
        # The site of each node that a gradient flows to; of several results, those of each.
        self._sites: dict[Node, Any] = {}
        self._ranks: dict[str, int] = {}
        self._calls: Counter[str] = Counter()
        self._whole: dict[str, str] = {}
        self._records = True

    def run(self, module: GraphModule, outer: tuple = ()) -> None:
        """All nodes of a graph, and those of checkpoints' bodies, in the order in which they run."""
        for node in module.graph.nodes:
            stack = node.meta.get("source_fn_stack")
            if stack and outer:
                # All checkpoints have one name there.
                stack = node.meta["source_fn_stack"] = [*outer, stack[-1]]
            if node.target is torch._C._set_grad_enabled:
                self._records = bool(node.args[0])
            elif getattr(node.target, "__name__", "") == _CHECKPOINT:
                self._sites[node] = self._checkpoint(getattr(module, node.args[0].target), node, tuple(stack or ()))
            elif node.op in ("call_function", "call_method") and stack:
                self._visit(node, path_of(stack))

    def _checkpoint(self, body: GraphModule, node: Node, stack: tuple) -> Any:
        """The sites of the results of a body that runs again during backward.

        Without a graph, a reentrant one is a custom function, whose gradients have the global exponent where they enter
        and leave it, and a forward pass of its own, in which calls are counted anew.
        """
        is_apart = bool(node.kwargs.get("use_reentrant"))
        for x, y in zip(body.graph.find_nodes(op="placeholder"), node.args[1:]):
            if not isinstance(y, Node):
                continue
            if y in self._parameters:
                self._parameters[x] = self._parameters[y]
            elif self._carries(y):
                self._sites[x] = GLOBAL if is_apart else self._sites.get(y, GLOBAL)
        if is_apart:
            self.apart.append(path_of(stack))
        calls = self._calls
        self._calls = Counter() if is_apart else calls
        self.run(body, stack)
        self._calls = calls
        output = next(one for one in reversed(body.graph.nodes) if one.op == "output")
        given = pytree.tree_leaves(output.args)
        return [GLOBAL if is_apart else self._sites.get(x, GLOBAL) for x in given]

    def _visit(self, node: Node, path: str) -> None:
        differentiable = [x for x in node.all_input_nodes if self._carries(x)]
        kind = self._kind(node)
        if kind == "shape":
            # Only the first argument has a gradient.
            differentiable = [x for x in differentiable if x is node.args[0]]
        if not differentiable or not self._records or kind == "fact":
            return
        site = self._site(node, kind, differentiable)
        self.keys[path] = site
        if getattr(node.target, "__name__", "") == _CUSTOM:
            # What its backward does is named so, whichever of them it is.
            self.keys["/".join([*path.split("/")[:-1], _IN_CUSTOM])] = site
        whole = self._call_of(node, _WHOLE)
        if whole is not None:
            self.wholes[path] = whole
        if not isinstance(node.target, FunctionType) and self._repeats(node, differentiable):
            self.repeating.append(path)
        if kind in ("product", "cell"):
            self.products.append(path)
        elif all(x in self._parameters for x in differentiable):
            self.opening.append(path)
        for x in differentiable:
            if x in self._parameters:
                self.read_at[self._parameters[x]] = site
        self._sites[node] = self._picked(node, site)
        if kind == "in-place" and node.args and isinstance(node.args[0], Node):
            self._sites.setdefault(node.args[0], site)

    def _kind(self, node: Node) -> OperatorKind:
        if not isinstance(node.target, str) and node.target.__name__ in _WRITES:
            return "in-place"
        return kind_of(node.target)

    def _carries(self, node: Node) -> bool:
        """Whether gradients flow to a node."""
        if node in self._parameters:
            return self._parameters[node].requires_grad
        tensors = [x for x in pytree.tree_leaves(node.meta.get("example_value")) if isinstance(x, Tensor)]
        # What was written in place has a site that it had not as it was made; whole numbers have no gradient.
        is_known = node in self._sites and any(x.is_floating_point() or x.is_complex() for x in tensors)
        return is_known or any(x.requires_grad for x in tensors)

    def _repeats(self, node: Node, differentiable: list[Node]) -> bool:
        """Whether a function is given one of these tensors more than once."""
        given = pytree.tree_leaves((node.args, node.kwargs))
        return any(sum(x is y for y in given) > 1 for x in differentiable)

    def _site(self, node: Node, kind: OperatorKind, differentiable: list[Node]) -> str:
        whole = self._call_of(node, _WHOLE)
        if whole is not None:
            return self._opened_whole(whole, node)
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            # A custom function sees gradients of the global exponent.
            return GLOBAL
        match kind:
            case "product":
                return self._opened(node, differentiable)
            case "cell":
                states = [x for x in pytree.tree_leaves(node.args[1:2]) if isinstance(x, Node) and self._carries(x)]
                site = self._of(states[0]) if states and states[0] not in self._parameters else GLOBAL
                return self._opened(node, differentiable) if site == GLOBAL else site
            case "in-place" if node.args and isinstance(node.args[0], Node) and node.args[0] in self._sites:
                return self._of(node.args[0])
        sites = [self._of(x) for x in differentiable if x not in self._parameters]
        return max(sites, key=lambda key: self._ranks.get(key, -1)) if sites else self._opened(node, differentiable)

    def _of(self, node: Node) -> str:
        """The site of a node's gradient; the latest of several results'."""
        site = self._sites.get(node, GLOBAL)
        return site if isinstance(site, str) else max(site, key=lambda key: self._ranks.get(key, -1), default=GLOBAL)

    def _picked(self, node: Node, site: str) -> str:
        """The site of a result: numbers are losses, at the global exponent; one of several has its own."""
        value = node.meta.get("example_value")
        if name_of(node.target) == "getitem" and isinstance(node.args[0], Node) and isinstance(node.args[1], int):
            several = self._sites.get(node.args[0])
            if isinstance(several, list):
                return several[node.args[1]]
        return GLOBAL if isinstance(value, Tensor) and value.dim() == 0 and not value._is_view() else site

    def _opened(self, node: Node, differentiable: Iterable[Node]) -> str:
        """The site of this call of a product, or of what reads parameters alone."""
        owner = next((self._owners[self._parameters[x]] for x in differentiable if x in self._parameters), None)
        return self._numbered(owner or ".".join([*self._place(node), name_of(node.target)]))

    def _opened_whole(self, call: str, node: Node) -> str:
        """The site of this call of a module that is one product: that of the module's parameters."""
        if call not in self._whole:
            self._whole[call] = self._numbered(".".join(self._place(node)) or "model")
        return self._whole[call]

    def _numbered(self, key: str) -> str:
        call = self._calls[key]
        self._calls[key] += 1
        key = f"{key}#{call}" if call else key
        self._ranks.setdefault(key, len(self._ranks))
        return key

    def _place(self, node: Node) -> list[str]:
        """The innermost module with parts that a node runs in."""
        calls = reversed(list(node.meta.get("nn_module_stack") or {}))
        # Dynamo calls a module by its id, and what follows an @ counts its calls.
        names = (self._parts.get(call.partition("@")[0]) for call in calls)
        name = next((name for name in names if name is not None), "")
        return [name] if name else []

    def _call_of(self, node: Node, kinds: tuple[type, ...]) -> str | None:
        """The call of a module of some classes that a node runs in."""
        calls = (node.meta.get("nn_module_stack") or {}).items()
        return next((call for call, (_, kind) in calls if isinstance(kind, type) and issubclass(kind, kinds)), None)


def owner(node: Node, parameter: nn.Parameter, backward: Backward) -> str:
    """The qualified name of the module that holds a parameter."""
    found = find_owner(parameter, backward)
    return found or _path(name_of_source(node.meta["grapharg"].source)).rpartition(".")[0] or "model"


def find_owner(parameter: Tensor, backward: Backward) -> str | None:
    """The module that holds a parameter, where a scaler's model lists it; else None."""
    return next((name for name in (one.of(parameter) for one in backward.names) if name), None)


def _path(source: str) -> str:
    return ".".join(a or b for a, b in _ATTRIBUTE.findall(source))
