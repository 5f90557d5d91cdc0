"""Formulas of derivatives that are quotients are known while a backward pass computes them."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from halfulp.subclass import _rule_table


class Watch(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.seen.append(_rule_table.is_in_quotient_formula())
        return operator(*args, **(kwargs or {}))


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_quotients_derivative_is_known_in_every_backward_pass(number, monkeypatch):
    x, y = torch.ones(3, requires_grad=True), torch.ones(3)
    monkeypatch.setattr(_rule_table, "_get_graph_task_id", lambda: number)
    for function, known in ((torch.hypot, True), (torch.mul, False)):
        result = function(x, y).sum()
        with Watch() as watch:
            result.backward()
        assert any(watch.seen) is known
