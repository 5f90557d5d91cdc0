"""Recurrent layers of multi-component parameters, with their gradients."""

import copy

import pytest
import torch
from torch import nn

from halfulp.mctensor import MCTensor
from halfulp.mctensor._convert_model import multicomponent
from halfulp.subclass import strict


@pytest.mark.sampled(1)
@pytest.mark.parametrize("gradients", ["first", "components"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (nn.LSTM, {"bidirectional": True, "num_layers": 2, "batch_first": True}),
        (nn.LSTM, {"bias": False}),
        (nn.GRU, {}),
        (nn.RNN, {}),
    ],
    ids=lambda given: str(given).rpartition(".")[2],
)
def test_a_recurrent_layer_is_as_in_float64(kind, options, dtype, gradients, seed):
    start = kind(3, 4, **options).double()
    with torch.no_grad():
        for parameter in start.parameters():
            parameter.copy_(parameter.to(dtype))
    x = torch.randn(5, 2, 3).to(dtype)
    probes = [torch.randn(shape, dtype=torch.float64) for shape in ((5, 2, 4 * (1 + start.bidirectional)), (4,))]

    def run(layer: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        out, last = layer(x)
        states = last if isinstance(last, tuple) else (last,)
        total = (out * probes[0].to(x.dtype)).sum()
        for state in states:
            total = total + (state * probes[1].to(x.dtype)).sum()
        total.backward()
        return out.detach(), {name: p.grad for name, p in layer.named_parameters()}

    probes = [probe.to(dtype).double() for probe in probes]
    model = multicomponent(copy.deepcopy(start), 2, dtype, gradients=gradients)
    with strict():
        out, ours = run(model, x)
    wanted, theirs = run(start, x.double())
    bits = {torch.float16: 11, torch.bfloat16: 8, torch.float32: 24, torch.float64: 50}[dtype]
    exact = 2.0 ** -(min(2 * bits, 50)) * 2**6
    assert isinstance(out, MCTensor)
    assert (out.decode() - wanted).abs().max() <= exact
    most = exact if gradients == "components" else 2.0**-bits * 2**6
    for name, value in theirs.items():
        mine = ours[name]
        assert isinstance(mine, MCTensor) == (gradients == "components")
        found = mine.decode() if isinstance(mine, MCTensor) else mine.double()
        assert (found - value).abs().max() <= most * max(1, value.abs().max()), name


def test_the_kernel_of_plain_lstms_is_as_before():
    before = torch._C._get_mkldnn_enabled()
    layer = multicomponent(nn.LSTM(3, 4), 2, torch.float32)
    assert isinstance(layer(torch.ones(5, 2, 3))[0], MCTensor)
    assert torch._C._get_mkldnn_enabled() == before
