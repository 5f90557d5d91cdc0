"""The nodes of torch's graph whose formulas divide by a sum, or by what else one number's range may round to 0."""

from __future__ import annotations

import torch

_graph_task = torch._C._current_graph_task_id
# 1 / (1 + exp(b - a)), 1 / (1 + x^2), a / (a^2 + b^2) and their like: beside a large x the 1 would vanish under one
# scale, and a finite gradient would be infinite.
_NODES = frozenset(
    f"{name}Backward0"
    for name in (
        *("Logaddexp", "Logaddexp2", "Log1P", "Atan", "Atan2", "Asinh", "Acosh", "Atanh", "Asin", "Acos", "Sinc"),
        *("Hypot", "Addcdiv", "Xlogy", "SpecialXlog1Py", "Log2", "Log10", "Logcumsumexp"),
    )
)


def in_quotient_formula() -> bool:
    """Return whether an operator is a step of such a node's formula."""
    if _graph_task() == -1:
        return False
    node = torch._C._current_autograd_node()
    return node is not None and node.name() in _NODES
