"""Copies and files: every component and the scale come back, into MCTensors."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from halfulp.kernels import same_bits
from halfulp.mctensor import MCTensor
from halfulp.mctensor._mctensor import PICKLED_LAYOUT_VERSION, rebuild_mctensor


def _same(a, b):
    assert isinstance(a, MCTensor)
    assert len(a.components) == len(b.components)
    scales = (a.scale is None) == (b.scale is None) and (a.scale is None or same_bits(a.scale, b.scale))
    return scales and a.gradients == b.gradients and all(map(same_bits, a.components, b.components))


def _examples():
    values = torch.randn(3, 4, dtype=torch.float64)
    yield MCTensor.encode(values, 2, torch.float32)
    yield MCTensor.encode(values, 4, torch.float64, gradients="components")
    yield MCTensor.encode(values * 1e-9, 3, torch.float16)
    yield MCTensor.encode(values, 2, torch.bfloat16, scale=0.5)


def _saved(x):
    buffer = io.BytesIO()
    torch.save({"x": x}, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)["x"]


@pytest.mark.parametrize(
    "way", [copy.deepcopy, copy.copy, lambda x: pickle.loads(pickle.dumps(x)), _saved, torch.clone]
)
def test_every_way_keeps_every_part(way, seed):
    for x in _examples():
        assert _same(way(x), x)
        parameter = nn.Parameter(x)
        assert isinstance(parameter, nn.Parameter)
        if way is not torch.clone:
            again = way(parameter)
            assert isinstance(again, nn.Parameter)
            assert again.requires_grad
            assert _same(again, x)


def test_a_deep_copy_shares_nothing_but_what_was_shared():
    x = MCTensor.encode([1e-9, 2e-9], 2, torch.float16)
    x.requires_grad_()
    (x * 2.0).sum().backward()
    module = nn.Module()
    module.a = module.b = nn.Parameter(x.detach())
    again = copy.deepcopy(module)
    assert again.a is again.b
    with torch.no_grad():
        again.a.mul_(2)
    assert _same(module.a.detach(), x.detach())
    other = copy.deepcopy(x)
    assert torch.equal(other.grad, x.grad)
    assert other.grad is not x.grad


def test_modules_move_load_and_copy(seed):
    def layer():
        made = nn.Linear(4, 3)
        made.weight = nn.Parameter(MCTensor.encode(torch.randn(3, 4, dtype=torch.float64), 2))
        return made

    first, second = layer(), layer()
    second.load_state_dict(first.state_dict())
    assert _same(second.weight.detach(), first.weight.detach())
    plain = nn.Linear(4, 3)
    plain.load_state_dict(first.state_dict())
    assert torch.equal(plain.weight, first.weight.decode(torch.float32))
    second.load_state_dict(nn.Linear(4, 3).state_dict())
    assert isinstance(second.weight, MCTensor)
    first.to(torch.float64)
    assert (first.weight.dtype, len(first.weight.components)) == (torch.float64, 2)
    assert isinstance(first.weight, nn.Parameter)
    assert isinstance(first.weight, MCTensor)


def test_shared_memory():
    x = MCTensor.encode([1.0, 2.0], dtype=torch.float16)
    assert not x.is_shared()
    assert x.share_memory_() is x
    assert x.is_shared()


def test_another_versions_file_is_refused():
    x = MCTensor.encode([1.0])
    with pytest.raises(ValueError, match="version"):
        rebuild_mctensor(PICKLED_LAYOUT_VERSION + 1, x.components, None, "first", False, False)


def test_a_result_with_history_is_not_pickled():
    x = MCTensor.encode([1.0]).requires_grad_() * 2
    with pytest.raises(RuntimeError, match="detach"):
        pickle.dumps(x)
    with pytest.raises(RuntimeError, match="detach"):
        copy.deepcopy(x)
