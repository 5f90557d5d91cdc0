"""Layers of products: what autograd saves of their inputs is narrow; attention still sees one tensor as one."""

import copy

import torch
from torch import nn
from torch.nn import functional

import halfulp as hu
from halfulp.kernels import same_bits
from halfulp.scaled import ScaledTensor, unscalify


class Gated(nn.Module):
    """A pointwise chain between two products, as in GPT-2."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 64), nn.Linear(64, 8)

    def forward(self, x):
        h = self.up(x)
        return self.down(0.5 * h * (1 + torch.tanh(h + 0.044715 * h**3)))


def saved_bytes(run) -> int:
    """Of all tensors that autograd keeps, each memory once."""
    found = {}

    def pack(x):
        for part in (x.payload,) if isinstance(x, ScaledTensor) else (x,):
            found[part.untyped_storage().data_ptr()] = part.untyped_storage()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        run()
    return sum(storage.nbytes() for storage in found.values())


def test_the_narrow_copy_is_what_is_saved_and_gives_the_same_numbers(seed):
    model = Gated()
    hooked, bare = (hu.scalify(copy.deepcopy(model), wide="autocast") for _ in range(2))
    for module in bare.modules():
        module._forward_pre_hooks.clear()
    x, results, sizes = torch.randn(256, 8), [], []
    for one in (hooked, bare):
        sizes.append(saved_bytes(lambda one=one: results.append(one(x))))
        results[-1].square().sum().backward()
    assert sizes[1] - sizes[0] == 256 * 64 * 2
    assert same_bits(results[0].detach().decode(), results[1].detach().decode())
    for p, q in zip(hooked.parameters(), bare.parameters()):
        assert same_bits(p.grad.payload, q.grad.payload)


def test_one_tensor_stays_one_for_attention(seed):
    layer = hu.scalify(nn.MultiheadAttention(8, 2, batch_first=True), wide="autocast")
    seen = []
    layer.register_forward_pre_hook(lambda module, arguments: seen.append(arguments))
    x = ScaledTensor.encode(torch.randn(2, 4, 8), home=torch.float16).exp()
    layer(x, x, value=x)[0].sum().backward()
    (query, key), *_ = seen
    assert query is key
    assert query.payload.dtype == torch.float16


def test_only_layers_with_a_home_have_the_hook_and_unscalify_takes_it_back(seed):
    def hooks(model):
        return [len(module._forward_pre_hooks) for module in (model.up, model.down)]

    model = hu.scalify(Gated(), wide="autocast", where="up.*")
    assert hooks(model) == [1, 0]
    assert hooks(hu.scalify(model, wide="autocast", where="up.*")) == [1, 0]
    assert hooks(hu.scalify(model, wide="none")) == [0, 0]
    assert hooks(hu.scalify(model, wide="autocast")) == [1, 1]
    assert hooks(hu.scalify(Gated(), torch.float32, wide="autocast")) == [0, 0]
    assert hooks(unscalify(model)) == [0, 0]


def test_recurrent_and_convolutional_layers_take_wide_inputs(seed):
    x = torch.randn(2, 4, 8)
    for layer in (nn.LSTM(8, 8, batch_first=True), nn.GRU(8, 8, batch_first=True), nn.Conv1d(4, 4, 3)):
        model = hu.scalify(copy.deepcopy(layer), wide="autocast")
        plain = unscalify(copy.deepcopy(model))
        wide = ScaledTensor.encode(x, home=torch.float16).exp()
        found, wanted = model(wide), plain(wide.decode())
        found, wanted = (y[0] if isinstance(y, tuple) else y for y in (found, wanted))
        assert found.payload.dtype == torch.float16
        assert functional.mse_loss(found.detach().decode(), wanted.detach()) <= 1e-5


def test_a_compiled_recurrent_layer_brings_its_results_home_too(fresh_compiler, seed):
    layer = hu.scalify(nn.LSTMCell(8, 8), wide="autocast")
    x = torch.randn(2, 8)
    found = torch.compile(lambda x: layer(x), backend="aot_eager")(x)
    wanted = layer(x)
    for y, z in zip(found, wanted):
        assert y.payload.dtype == z.payload.dtype == torch.float16
        assert (y.detach().decode() - z.detach().decode()).norm() <= 1e-3 * z.detach().decode().norm()
    sum(y.sum() for y in found).backward()
