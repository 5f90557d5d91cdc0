"""Rescaling: values stay, payloads come to magnitudes about 1."""

import copy
import math

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import halfulp as hu
from halfulp.kernels import same_bits
from halfulp.scaled import ScaledTensor
from halfulp.scaled._rescale import rescale_input_gradient


def powers() -> float:
    return 2.0 ** int(torch.randint(-9, 6, ()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float8_e5m2])
def test_the_root_mean_square_comes_to_one_and_values_stay(dtype, seed):
    values = torch.randn(500).clamp(-4, 4)
    values[::7] = 0
    values[3:6] = torch.tensor([torch.inf, -torch.inf, torch.nan])
    x = ScaledTensor(values.mul(powers()).to(dtype), powers())
    y = hu.rescale(x)
    used = y.payload.double()
    used = used[used.isfinite() & (used != 0)]
    # Eight bits may lose elements below their smallest number on the way, and round those next to it.
    assert abs(math.log2(used.square().mean().sqrt())) <= 0.5 + 1e-3
    magnitudes = x.payload.float().abs()
    same = (magnitudes >= magnitudes.nan_to_num(0, 0, 0).max() * 2.0**-10) | ~values.isfinite()
    assert same_bits(y.decode()[same], x.decode()[same])
    assert y.payload.dtype == dtype


def test_the_side_tells_which_pass(seed):
    for side, forward, backward in (("forward", True, False), ("gradient", False, True)):
        x = ScaledTensor(torch.randn(64) * 2.0**-9, 1.0).requires_grad_()
        for track in (True, False):
            with torch.set_grad_enabled(track):
                y = hu.rescale(x, side)
            assert torch.equal(y.decode(), x.decode())
            assert (y.scale != 1) == forward
        y = hu.rescale(x, side)
        gradient = ScaledTensor(torch.randn(64) * 2.0**-7, 1.0)
        y.backward(gradient)
        assert torch.equal(x.grad.decode(), gradient.decode())
        assert (x.grad.scale != 1) == backward


@pytest.mark.parametrize("side", ["forward", "gradient"])
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiled_it_is_the_same(side, seed, needs_torch):
    if side == "gradient":
        needs_torch("graphs whose only result is a view of a tensor subclass")
    x = ScaledTensor((torch.randn(64) * 2.0**-9).half(), 2.0**3).requires_grad_()
    compiled = torch.compile(lambda x: hu.rescale(x, side), backend="aot_eager", fullgraph=True)
    for track in (True, False):
        with torch.set_grad_enabled(track):
            ours, wanted = compiled(x), hu.rescale(x, side)
        assert torch.equal(ours.payload, wanted.payload)
        assert torch.equal(ours.scale, wanted.scale)


def test_the_ends_of_the_range():
    zeros = torch.zeros_like(ScaledTensor.encode(torch.ones(3)))
    assert torch.equal(hu.rescale(zeros).scale, zeros.scale)
    assert hu.rescale(ScaledTensor(torch.ones(0), 1.0)).shape == (0,)
    lone = ScaledTensor(torch.tensor([torch.inf, 0.0]), 4.0)
    assert torch.equal(hu.rescale(lone).scale, lone.scale)
    for payload, scale in ((2.0**100, 2.0**100), (2.0**-100, 2.0**-100), (1.0, 2.0**127), (1.0, 2.0**-126)):
        x = ScaledTensor(torch.tensor([payload]), scale)
        y = hu.rescale(x)
        assert y.payload.double() * y.scale.double() == x.payload.double() * x.scale.double()
    # One large element among many small: the storage's range decides.
    spike = ScaledTensor(torch.cat([torch.full((10**6,), 2.0**-24), torch.tensor([30000.0])]).half(), 1.0)
    assert hu.rescale(spike).payload.isfinite().all()
    assert hu.rescale(spike)[-1].item() == pytest.approx(30000)


def test_plain_tensors_and_bad_input():
    x = torch.ones(2)
    assert hu.rescale(x) is x
    with pytest.raises(TypeError, match=r"a torch\.Tensor"):
        hu.rescale(1.0)
    with pytest.raises(ValueError, match="side="):
        hu.rescale(x, side="both")


@pytest.mark.parametrize("side", ["forward", "gradient"])
def test_second_derivatives_flow_through_it(side, seed):
    x, w = torch.randn(4, 8), torch.randn(8, 8)
    plain = x.clone().requires_grad_(), w.clone().requires_grad_()
    scaled = tuple(ScaledTensor.encode(t, torch.float32).detach().requires_grad_() for t in (x, w))
    for a, b in (plain, scaled):
        y = torch.nn.functional.layer_norm(hu.scaled.rescale(torch.tanh(a @ b), side=side), (8,)) ** 3
        (gradient,) = torch.autograd.grad(y.sum(), a, create_graph=True)
        gradient.square().sum().backward()
    for wanted, found in zip(plain, scaled):
        assert (found.grad.decode() - wanted.grad).norm() <= 1e-4 * wanted.grad.norm()


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


def square(out: torch.Tensor) -> torch.Tensor:
    return out.square().sum()


def list_rescales(model: nn.Module) -> list[str]:
    return [
        name for name, module in model.named_modules() if rescale_input_gradient in module._forward_pre_hooks.values()
    ]


def test_norms_are_found_by_their_classes_names():
    llama = LlamaForCausalLM(
        LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=9)
    )
    assert list(list_rescales(hu.scalify(llama))) == [
        *("model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm", "model.norm"),
    ]
    kinds = nn.Sequential(nn.BatchNorm2d(2), nn.GroupNorm(1, 2), nn.RMSNorm(2), nn.InstanceNorm1d(2, affine=True))
    assert len(list_rescales(hu.scalify(kinds))) == 4
    assert list_rescales(hu.scalify(kinds, rescale=None)) == []


@pytest.mark.parametrize(
    ("dtype", "matmul", "count"),
    [
        ("float16", None, 1),
        ("float8_e5m2", None, 1),
        ("bfloat16", "fp8", 1),
        ("bfloat16", None, 0),
        ("float32", None, 0),
    ],
)
def test_only_where_numbers_are_narrower_than_float32s_range(dtype, matmul, count):
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    assert len(list_rescales(hu.scalify(model, getattr(torch, dtype), matmul))) == count
    assert len(list_rescales(hu.scalify(model, getattr(torch, dtype), matmul, rescale="norms"))) == 1


def test_gradients_keep_their_values_and_gain_their_place(seed):
    plain = nn.Sequential(*(Block() for _ in range(12)))
    x = torch.randn(8, 32)
    with_rescale = hu.scalify(copy.deepcopy(plain), torch.float32, rescale="norms")
    without = hu.scalify(copy.deepcopy(plain), torch.float32, rescale=None)
    for model in (with_rescale, without):
        (model(x).sum() * 2.0**-20).backward()
    for p, q in zip(with_rescale.parameters(), without.parameters()):
        assert torch.equal(p.grad.decode(), q.grad.decode())


def test_places_are_copied_changed_and_removed(seed):
    model = hu.scalify(nn.Sequential(Block(), Block()))
    assert list_rescales(model) == ["0.norm", "1.norm"]
    with pytest.raises(ValueError, match=r"elsewhere call hu\.rescale"):
        hu.scalify(model, rescale=["*.up"])
    twin = copy.deepcopy(model)
    assert list_rescales(twin) == list_rescales(model)
    square(twin(torch.randn(4, 32) * 2.0**-6)).backward()
    hu.scaled.unscalify(model)
    assert list_rescales(model) == []
