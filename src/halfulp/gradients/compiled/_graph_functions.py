"""Finds the forward functions of a joint graph's backward nodes that torch does not name: in-place functions.

Torch finds the function that a backward node is in the derivative of by autograd's sequence numbers: a node of the
forward pass has the number of autograd's latest node as it was made. Two kinds of autograd's nodes have none of the
forward pass's. An in-place function whose derivative needs what it overwrites keeps a clone, which is made between
autograd's node and the write, so that the write has the clone's number, the next one. And a write into a view is
followed by a node of its own (CopySlices), after the write, which has the number before. What CopySlices does begins
with an empty tensor.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from ..._torch_versions import NAMES_ALL_FUNCTIONS, adds_gradients, is_backward

# Where torch keeps the functions of forward nodes, and those of backward nodes.
_OWN, _FORWARD = "source_fn_stack", "fwd_source_fn_stack"


def name_functions(joint: GraphModule) -> None:
    """Give backward nodes their forward functions' names, as torch does, where it gave none."""
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
