"""Attention and recurrent layers of scaled tensors."""

import copy
import types

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from halfulp.scaled import ScaledTensor
from halfulp.subclass import record_fallbacks, strict
from halfulp.testing import check_rule

attention = functional.scaled_dot_product_attention
QUERY, KEY = (2, 4, 9, 8), (2, 4, 11, 8)


def _masked(*shape: int) -> Tensor:
    mask = torch.rand(shape) > 0.3
    mask[..., 0] = True
    return mask


MASKS = {
    "none": lambda: None,
    "truth values": lambda: _masked(9, 11),
    "numbers": lambda: torch.randn(2, 1, 9, 11),
    "minus infinity": lambda: torch.zeros(9, 11).masked_fill(~_masked(9, 11), -float("inf")),
    "the smallest number": lambda: torch.zeros(9, 11).masked_fill(~_masked(9, 11), torch.finfo(torch.float32).min),
}
KINDS = {
    "causal": (lambda q, k, v: attention(q, k, v, is_causal=True, scale=0.3), QUERY, QUERY, QUERY),
    "grouped": (lambda q, k, v: attention(q, k, v, enable_gqa=True), QUERY, (2, 2, 11, 8), (2, 2, 11, 8)),
    "of views": (lambda q, k, v: attention(*(x.transpose(1, 2) for x in (q, k, v))), *[(2, 9, 4, 8)] * 3),
    "of expanded keys": (lambda q, k, v: attention(q, k.expand(KEY), v), QUERY, (2, 1, 11, 8), KEY),
    "three dimensions": (attention, (4, 9, 8), (4, 11, 8), (4, 11, 8)),
}


@pytest.mark.parametrize("mask", MASKS)
def test_attention_is_the_plain_one_whatever_the_scales(mask, seed):
    given = MASKS[mask]()
    with strict():
        check_rule(
            lambda q, k, v: attention(q, k, v, attn_mask=given),
            lambda: [torch.randn(shape) for shape in (QUERY, KEY, KEY)],
            trials=3,
            seed=seed,
        )


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", KINDS)
def test_kinds_of_attention_are_the_plain_ones(name, differences, seed):
    operator, *shapes = KINDS[name]
    with strict():
        check_rule(operator, lambda: [torch.randn(shape) for shape in shapes], trials=2, seed=seed)
    assert max(differences(operator, shapes)) < 1e-2


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mask", MASKS)
def test_attention_of_float16_payloads_is_near(mask, differences, seed):
    given = MASKS[mask]()
    assert max(differences(lambda q, k, v: attention(q, k, v, attn_mask=given), [QUERY, KEY, KEY])) < 1e-2


def test_a_scaled_mask_and_one_that_learns(differences, seed):
    with strict():
        check_rule(
            lambda q, k, v, mask: attention(q, k, v, attn_mask=mask.detach()),
            lambda: [torch.randn(shape) for shape in (QUERY, KEY, KEY, (9, 11))],
            trials=2,
            seed=seed,
        )
    operator = lambda q, k, v, mask: attention(q, k, v, attn_mask=mask)  # noqa: E731
    assert max(differences(operator, [QUERY, KEY, KEY, (9, 11)])) < 1e-2
    assert max(differences(operator, [QUERY, KEY, KEY, (9, 11)], torch.float32)) < 1e-6


def test_zeros_and_far_scales(seed):
    q, k, v = (torch.randn(1, 2, 5, 8) for _ in range(3))
    wanted = attention(q, k, v)
    x, y, z = (ScaledTensor(t * 2.0**-e, 2.0**e).requires_grad_() for t, e in ((q, 40), (k, -50), (v, 30)))
    out = attention(x, y, z)
    assert torch.equal(out.decode(), wanted)
    zeros = torch.zeros_like(x).detach().requires_grad_()
    flat = attention(zeros, y, z)
    flat.sum().backward()
    assert torch.allclose(flat.decode(), v.mean(2, keepdim=True).expand_as(v), atol=1e-6)
    assert zeros.grad.isfinite().all()
    assert y.grad.isfinite().all()
    assert not y.grad.any()


def test_payloads_of_gradients_stay_in_range(seed):
    q, k, v = (ScaledTensor.encode(torch.randn(1, 2, 512, 64)).requires_grad_() for _ in range(3))
    out = attention(q, k, v)
    out.backward(ScaledTensor.encode(torch.randn(out.shape) * 1e-6))
    for x in (q, k, v):
        assert 2**-6 < x.grad.payload.float().square().mean().sqrt() < 2**6


def test_dropout_is_random_and_keeps_the_mean(seed):
    q, k, v = (ScaledTensor.encode(torch.randn(2, 4, 64, 8)).requires_grad_() for _ in range(3))
    out = attention(q, k, torch.ones_like(v), dropout_p=0.5)
    assert abs(out.mean().item() - 1) < 0.2
    assert out.detach().decode().std() > 1e-3
    out.sum().backward()
    assert q.grad.isfinite().all()


def test_the_choice_of_a_kernel_is_the_plain_one():
    plain = [torch.randn(2, 3, 5, 8)] * 3
    assert torch._fused_sdp_choice(*map(ScaledTensor.encode, plain)) == torch._fused_sdp_choice(*plain)


def test_attention_of_bfloat16_multiplies_in_bfloat16_on_cuda(monkeypatch):
    from halfulp.scaled.rules import _layers as _networks

    def chosen(
        storage, width=8, device="cuda", operator=torch.ops.aten._scaled_dot_product_efficient_attention.default
    ):
        x = types.SimpleNamespace(shape=(2, 3, 5, width), device=torch.device(device))
        return _networks._choose_kernel_dtype(operator, storage, torch.float32, x, x)

    monkeypatch.setattr(_networks, "has_cuda_capability", lambda device, *least: True)
    assert chosen(torch.bfloat16) == torch.bfloat16
    for wide in (chosen(torch.float16), chosen(torch.bfloat16, width=12), chosen(torch.bfloat16, device="cpu")):
        assert wide == torch.float32
    monkeypatch.setattr(_networks, "has_cuda_capability", lambda device, *least: False)
    assert chosen(torch.bfloat16) == torch.float32


@pytest.mark.parametrize("training", [True, False])
def test_modules_of_attention(training, seed):
    layers = [
        nn.MultiheadAttention(8, 2, batch_first=True),
        nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True),
    ]
    x = torch.randn(3, 5, 8)
    for layer in layers:
        twin = copy.deepcopy(layer.train(training))
        for module in twin.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(ScaledTensor.encode(parameter.detach(), torch.float32)))
        scaled = ScaledTensor.encode(x, torch.float32)
        for enabled in (True, False):  # without gradients torch takes other steps
            with torch.set_grad_enabled(enabled), record_fallbacks() as counts:
                if isinstance(layer, nn.MultiheadAttention):
                    y, wanted = twin(scaled, scaled, scaled)[0], layer(x, x, x)[0]
                else:
                    y, wanted = twin(scaled), layer(x)
            assert not counts
            assert torch.allclose(y.detach().decode(), wanted.detach(), atol=1e-5)


def test_one_graph_gives_the_same_bits(seed):
    tensors = [ScaledTensor.encode(torch.randn(2, 3, 5, 8), torch.float32) for _ in range(3)]
    twins = [x.clone().requires_grad_() for x in tensors]
    tensors = [x.requires_grad_() for x in tensors]
    attention(*tensors).sum().backward()
    torch.compile(attention, fullgraph=True, backend="aot_eager")(*twins).sum().backward()
    assert all(torch.equal(x.grad.decode(), y.grad.decode()) for x, y in zip(tensors, twins))


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


@pytest.mark.sampled(1)
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
