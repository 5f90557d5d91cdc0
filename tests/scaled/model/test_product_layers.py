"""Layers of products: what autograd saves of their inputs is narrow; attention still sees one tensor as one."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import halfulp as hu
from halfulp.kernels import same_bits
from halfulp.scaled import ScaledTensor, unscalify
from halfulp.scaled import _scalify as _product_layers


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


def kept_factors(model, x) -> list:
    """What the last multiplication before the second product keeps, as (storage, whether it is widened in use)."""
    seen = []
    hook = model.down.register_forward_pre_hook(lambda module, arguments: seen.append(arguments[0]), prepend=True)
    model(x)
    hook.remove()
    node = seen[0].grad_fn
    # What moves elements is looked through.
    while node.name() != "MulBackward0":
        node = node.next_functions[0][0]
    return [(s.data.payload.dtype, s.unpack_hook is not None) for s in (node._raw_saved_self, node._raw_saved_other)]


class Activated(Gated):
    """One of several functions between the products."""

    def __init__(self, activation):
        super().__init__()
        self.activation = activation

    def forward(self, x):
        return self.down(self.activation(self.up(x)))


NARROW, WIDE, NARROWED = (torch.float16, False), (torch.float32, False), (torch.float16, True)
FACTORS = {
    "of a sum": (lambda h: h * (1 + torch.tanh(h)), [NARROW, NARROWED]),
    "moved": (lambda h: (h * (1 + torch.tanh(h))).view(2, -1, 64).transpose(0, 1), [NARROW, NARROWED]),
    "both wide": (lambda h: (1 - torch.tanh(h)) * (1 + torch.tanh(h)), [NARROWED, NARROWED]),
    # The function keeps its result too.
    "of tanh": (lambda h: h * torch.tanh(h), [NARROW, WIDE]),
    "of tanh, moved": (lambda h: h * torch.tanh(h).view(h.shape), [NARROW, WIDE]),
}


@pytest.mark.parametrize("name", FACTORS)
def test_the_last_multiplication_keeps_narrow_factors_that_nothing_else_keeps(name, seed, needs_torch):
    needs_torch("SavedTensor.unpack_hook")
    activation, expected = FACTORS[name]
    model, x = hu.scalify(Activated(activation)), torch.randn(8, 8)
    assert kept_factors(model, x) == expected


def test_a_narrow_factor_costs_gradients_one_rounding_and_can_be_differentiated_again(seed, monkeypatch, needs_torch):
    needs_torch("SavedTensor.unpack_hook")
    models = [hu.scalify(Gated())]
    models.append(copy.deepcopy(models[0]))
    x, found = torch.randn(32, 8), []
    for model in models:
        if found:
            monkeypatch.setattr(_product_layers, "_narrow_last_factors", lambda node: None)
        parameters = list(model.parameters())
        first = torch.autograd.grad(model(x).square().sum(), parameters, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), parameters)
        found.append([g.detach().decode() for g in (*first, *second)])
    for narrow, wide in zip(*found, strict=True):
        assert (narrow - wide).norm() <= 2e-3 * wide.norm()
    assert not all(torch.equal(*pair) for pair in zip(*found, strict=True))


def test_where_saved_tensors_have_hooks_already_factors_stay_as_they_are(seed, needs_torch):
    needs_torch("SavedTensor.unpack_hook")
    model, x = hu.scalify(Activated(FACTORS["of a sum"][0])), torch.randn(8, 8)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        assert kept_factors(model, x) == [(torch.float16, True), (torch.float32, True)]
    found = [checkpoint(model, x, use_reentrant=False), model(x)]
    grads = []
    for y in found:
        model.zero_grad()
        y.square().sum().backward()
        grads.append([p.grad.detach().decode() for p in model.parameters()])
    assert same_bits(*(y.detach().decode() for y in found))
    for one, other in zip(*grads, strict=True):
        assert (one - other).norm() <= 2e-3 * other.norm()


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
