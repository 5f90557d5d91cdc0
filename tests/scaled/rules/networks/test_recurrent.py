"""Recurrent layers with scaled parameters, with their gradients."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from halfulp.scaled import ScaledTensor
from halfulp.subclass import strict

LAYERS = [
    (nn.LSTM, {}),
    (nn.LSTM, {"num_layers": 2, "bidirectional": True, "bias": False, "batch_first": True}),
    (nn.LSTM, {"proj_size": 4}),
    (nn.GRU, {"bidirectional": True}),
    (nn.RNN, {}),
    (nn.RNN, {"nonlinearity": "relu"}),
]


def _value(x: Tensor) -> Tensor:
    return x.detach().decode() if isinstance(x, ScaledTensor) else x.detach()


def _scaled(module: nn.Module, dtype: torch.dtype, shift: int) -> nn.Module:
    twin = copy.deepcopy(module)
    for name, parameter in list(twin.named_parameters()):
        scaled = ScaledTensor.encode(parameter.detach(), dtype)
        if dtype == torch.float32:
            scaled = scaled.with_scale(scaled.scale * 2.0**shift)
        setattr(twin, name, nn.Parameter(scaled.detach()))
    if isinstance(twin, nn.RNNBase):
        twin._flat_weights = [getattr(twin, name) for name in twin._flat_weights_names]
    return twin


def _run(layer: nn.Module, x: Tensor, packed: bool) -> list[Tensor]:
    """The output, and the gradients of the input and the parameters."""
    given = pack_padded_sequence(x, [5, 3], batch_first=layer.batch_first) if packed else x
    out, last = layer(given)
    out = pad_packed_sequence(out)[0] if isinstance(out, PackedSequence) else out
    total = (out * out * out + out).sum()  # whose gradient does not vanish where outputs do
    for state in last if isinstance(last, tuple) else (last,):
        total = total + (state * state).sum()
    total.backward()
    return [_value(out), *(_value(p.grad) for p in (x, *layer.parameters()))]


@pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning")
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("kind", "options"), LAYERS, ids=lambda given: str(given).rpartition(".")[2])
def test_a_recurrent_layer_is_the_plain_one(kind, options, packed, seed):
    layer = kind(3, 8, **options)
    x = torch.randn(2, 5, 3) if layer.batch_first else torch.randn(5, 2, 3)
    wanted = _run(layer, x.clone().requires_grad_(), packed)
    results = []
    for dtype, shift in ((torch.float32, -9), (torch.float32, 7), (torch.float16, 0)):
        with strict():
            twin = _scaled(layer, dtype, shift)
            results.append(_run(twin, ScaledTensor.encode(x, dtype).requires_grad_(), packed))
    first, other, half = results
    assert all(map(torch.equal, first, other))
    assert all((x - y).norm() <= 1e-6 * y.norm() for x, y in zip(first, wanted))
    # Where a unit's sum is next to the kink of a ReLU, sixteen bits take it across, and its gradient jumps.
    near = half[:1] if options.get("nonlinearity") == "relu" else half
    assert all((x - y).norm() <= 2e-2 * y.norm() for x, y in zip(near, wanted))


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_a_cell_is_the_plain_one(kind, seed):
    cell = kind(3, 4)
    twin, x = _scaled(cell, torch.float32, 5), torch.randn(2, 3)
    for module, given in ((cell, x), (twin, ScaledTensor.encode(x, torch.float32))):
        with strict():
            state = module(given)
            (state[0] if isinstance(state, tuple) else state).square().sum().backward()
    for p, q in zip(cell.parameters(), twin.parameters()):
        assert (q.grad.decode() - p.grad).norm() <= 1e-6 * p.grad.norm()


def test_gradients_of_a_layer_take_far_scales(seed):
    layer = _scaled(nn.LSTM(3, 4), torch.float16, 0)
    x = ScaledTensor.encode(torch.randn(5, 2, 3))
    found = []
    for exponent in (0, -100):
        layer.zero_grad()
        out, _ = layer(x)
        out.backward(ScaledTensor(torch.ones(out.shape, dtype=torch.float16), 2.0**exponent))
        found.append([p.grad for p in layer.parameters()])
    for near, far in zip(*found):
        assert torch.equal(near.payload, far.payload)
        assert far.scale.item() == near.scale.item() * 2.0**-100
