"""Plain inputs of another dtype than the components': they enter every layer with all digits."""

import copy
import inspect

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from halfulp import MCTensor, multicomponent
from halfulp.mctensor import single_component

r = torch.randn
LAYERS = {
    "Linear": (lambda: nn.Linear(4, 3), lambda: (r(2, 4),)),
    "Bilinear": (lambda: nn.Bilinear(4, 3, 2), lambda: (r(5, 4), r(5, 3))),
    "PReLU": (lambda: nn.PReLU(4), lambda: (r(2, 4),)),
    "Conv1d": (lambda: nn.Conv1d(3, 4, 2), lambda: (r(2, 3, 6),)),
    "Conv2d": (lambda: nn.Conv2d(3, 4, 2), lambda: (r(2, 3, 6, 6),)),
    "Conv2d without bias": (lambda: nn.Conv2d(3, 4, 2, bias=False), lambda: (r(2, 3, 6, 6),)),
    "Conv2d same": (lambda: nn.Conv2d(3, 4, 3, padding="same", padding_mode="reflect"), lambda: (r(2, 3, 6, 6),)),
    "Conv3d": (lambda: nn.Conv3d(3, 4, 2), lambda: (r(2, 3, 4, 4, 4),)),
    "ConvTranspose1d": (lambda: nn.ConvTranspose1d(3, 4, 2), lambda: (r(2, 3, 6),)),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(3, 4, 2), lambda: (r(2, 3, 5, 5),)),
    "ConvTranspose3d": (lambda: nn.ConvTranspose3d(3, 4, 2), lambda: (r(2, 3, 3, 3, 3),)),
    "LSTM": (lambda: nn.LSTM(3, 4, 2, bidirectional=True), lambda: (r(5, 2, 3),)),
    "LSTM with states": (lambda: nn.LSTM(3, 4), lambda: (r(5, 2, 3), (r(1, 2, 4), r(1, 2, 4)))),
    "LSTM projected": (lambda: nn.LSTM(3, 4, proj_size=2), lambda: (r(5, 2, 3),)),
    "GRU": (lambda: nn.GRU(3, 4, batch_first=True), lambda: (r(2, 5, 3),)),
    "RNN": (lambda: nn.RNN(3, 4, nonlinearity="relu"), lambda: (r(5, 2, 3),)),
    "LSTMCell": (lambda: nn.LSTMCell(3, 4), lambda: (r(2, 3),)),
    "GRUCell": (lambda: nn.GRUCell(3, 4), lambda: (r(2, 3),)),
    "RNNCell": (lambda: nn.RNNCell(3, 4), lambda: (r(2, 3),)),
    "attention": (lambda: nn.MultiheadAttention(4, 2), lambda: (r(3, 2, 4), r(3, 2, 4), r(3, 2, 4))),
    "attention of three": (
        lambda: nn.MultiheadAttention(4, 2, kdim=3, vdim=5, add_bias_kv=True),
        lambda: (r(3, 2, 4), r(3, 2, 3), r(3, 2, 5)),
    ),
    "encoder": (lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0), lambda: (r(3, 2, 4),)),
    "decoder": (lambda: nn.TransformerDecoderLayer(4, 2, 8, dropout=0.0), lambda: (r(3, 2, 4), r(3, 2, 4))),
    "LayerNorm": (lambda: nn.LayerNorm(4), lambda: (r(2, 4),)),
    "RMSNorm": (lambda: nn.RMSNorm(4, eps=0.1), lambda: (r(2, 4),)),
    "GroupNorm": (lambda: nn.GroupNorm(2, 4), lambda: (r(2, 4, 3),)),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(4), lambda: (r(3, 4, 2, 2),)),
    "InstanceNorm1d": (lambda: nn.InstanceNorm1d(4, affine=True), lambda: (r(2, 4, 3),)),
}
RECURRENT = ("LSTM", "LSTM with states", "LSTM projected", "GRU", "RNN")
# Components, and the digits of a result of float32 inputs, which float32 has with two components of 16 bits.
NEAR = {torch.float16: 1e-10, torch.bfloat16: 1e-10, torch.float32: 1e-10, torch.float64: 1e-13}
# Of gradients, rounded to the dtype of the plain inputs. Norms over few elements magnify a rounding by 1 / deviation.
ROUNDED = {torch.float16: 2.0**-8, torch.bfloat16: 2.0**-6, torch.float32: 2.0**-17, torch.float64: 2.0**-17}


def floats(tree):
    return [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor) and x.is_floating_point()]


@pytest.mark.sampled(1)
@pytest.mark.filterwarnings("ignore:LSTM with projections", "ignore::halfulp.subclass.FallbackWarning")
@pytest.mark.parametrize("dtype", NEAR)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_takes_plain_float32(name, training, dtype, seed):
    make, given = LAYERS[name]
    if name in RECURRENT and dtype != torch.float32:
        pytest.skip("takes its own dtype, as torch's")
    start = make().double().train(training)
    with torch.no_grad():
        for parameter in start.parameters():
            parameter.copy_(MCTensor.encode(parameter, 2, dtype).decode())
    model = multicomponent(copy.deepcopy(start), 2, dtype)
    inputs = given()

    def run(layer, wide):
        entered = tree_map(lambda x: (x.double() if wide else x.clone()).requires_grad_(), inputs)
        out = layer(*entered)
        sum(((y + 1) * (y + 1)).sum() for y in floats(out)).backward()
        return floats(out), [x.grad for x in floats(entered)], [p.grad for p in layer.parameters()]

    for found, wanted in zip(run(model, False), run(start, True)):
        for x, y in zip(found, wanted, strict=True):
            if y.grad_fn is not None:
                assert isinstance(x, MCTensor), name
                buffers = [buffer.dtype for buffer in model.buffers() if buffer.is_floating_point()]
                assert x.dtype == (buffers or [torch.promote_types(torch.float32, dtype)])[0]
                assert (x.detach().decode() - y.detach()).abs().max() <= NEAR[dtype] * max(1.0, y.abs().max().item())
            else:
                x = x.decode() if isinstance(x, MCTensor) else x.double()
                assert (x - y).abs().max() <= ROUNDED[dtype] * max(1.0, y.abs().max().item()), name


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_take_their_own_dtype_as_torchs(kind, seed):
    model, x = multicomponent(kind(3, 4), 2, torch.bfloat16), r(5, 2, 3)
    with pytest.raises((ValueError, RuntimeError), match=r"d?type"):
        model(x)
    out, _ = model(MCTensor.encode(x, 2, torch.bfloat16))
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert model.weight_ih_l0.grad.dtype == torch.bfloat16


def test_every_layer_with_a_weight_is_listed():
    names = {name for name, kind in vars(nn).items() if inspect.isclass(kind) and issubclass(kind, nn.Module)}
    listed = {type(make()).__name__ for make, _ in LAYERS.values()} | {"MultiheadAttention"}
    weighted = {
        name for name in names if name.startswith(("Conv", "LSTM", "GRU", "RNN", "PReLU", "Bilinear", "Linear"))
    }
    assert weighted <= listed | {"RNNBase", "RNNCellBase", "LinearCrossEntropyLoss"}


@pytest.mark.skipif(not hasattr(nn, "LinearCrossEntropyLoss"), reason="this torch has no such loss")
@pytest.mark.parametrize("dtype", NEAR)
def test_a_loss_with_a_weight(dtype, seed):
    model = multicomponent(nn.LinearCrossEntropyLoss(4, 3), 2, dtype)
    plain = single_component(copy.deepcopy(model), torch.float64)
    for parameter, own in zip(plain.parameters(), model.parameters()):
        parameter.data.copy_(own.detach().decode())
    x, target = r(5, 4), torch.tensor([0, 1, 2, 0, 1])
    loss = model(x, target)
    assert isinstance(loss, MCTensor)
    assert abs(loss.item() - plain(x.double(), target).item()) <= NEAR[dtype]
