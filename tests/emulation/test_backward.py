"""Gradients: each one is rounded, bit for bit as by hand."""

import importlib.util
import pathlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from halfulp.emulation import emulate, region

_spec = importlib.util.spec_from_file_location("oracle", pathlib.Path(__file__).with_name("oracle.py"))
oracle = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(oracle)
Oracle, nearest = oracle.Oracle, oracle.nearest

FORMATS = {"bf16": 7, "e8m3": 3, "e8m1": 1}


@pytest.fixture(params=FORMATS)
def format(request):
    return request.param


@pytest.fixture
def op(format):
    return Oracle(FORMATS[format])


def check(module, by_hand, inputs, format):
    """Outputs, the input's gradients and all parameters' gradients, to the last bit."""
    handle = emulate(module, format)
    bits = FORMATS[format]
    ours = [i.clone().requires_grad_() for i in inputs]
    theirs = [i.clone().requires_grad_() for i in inputs]
    out = module(*ours)
    weight = torch.randn_like(out)
    (out * weight).sum().backward()
    got = [out, *[i.grad for i in ours], *[p.grad for p in module.parameters()]]
    handle.remove()
    module.zero_grad()
    op = Oracle(bits)
    held = {name: op.q(p) for name, p in module.named_parameters()}
    out = by_hand(op, held, *[op.q(i) for i in theirs])
    (out * weight).sum().backward()
    want = [out, *[i.grad for i in theirs], *[p.grad for p in module.parameters()]]
    assert len(got) == len(want)
    for a, b in zip(got, want):
        assert torch.equal(a, b), (a - b).abs().max()
        assert torch.equal(a, nearest(a, bits))


def test_mlp(seed, format):
    model = nn.Sequential(nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 5))

    def by_hand(op, p, x):
        h = op(F.relu, op(F.linear, x, p["0.weight"], p["0.bias"]))
        return op(F.linear, h, p["2.weight"], p["2.bias"])

    check(model, by_hand, [torch.randn(7, 12)], format)


def test_mlp_by_hand_without_autograd(seed, op, format):
    """The same with the backward pass written out."""

    def r(t):
        return nearest(t, op.mantissa_bits)

    model = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 4))
    emulate(model, format)
    x, g = r(torch.randn(5, 6)), torch.randn(5, 4)
    out = model(x)
    out.backward(g)
    w1, b1, w2, b2 = (p.detach() for p in model.parameters())
    z = r(torch.addmm(b1, x, w1.T))
    h = z.relu()
    assert torch.equal(out, r(torch.addmm(b2, h, w2.T)))
    g = r(g)
    dz = r(g @ w2) * (z > 0)
    wanted = [r(dz.T @ x), r(dz.sum(0)), r(g.T @ h), r(g.sum(0))]
    for parameter, want in zip(model.parameters(), wanted):
        assert torch.equal(parameter.grad, want)


def test_conv_and_pool(seed, format):
    model = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.SiLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(12, 3))

    def by_hand(op, p, x):
        h = op(lambda a, w, b: F.conv2d(a, w, b, padding=1), x, p["0.weight"], p["0.bias"])
        h = op(F.avg_pool2d, op(F.silu, h), 2)
        return op(F.linear, h.flatten(1), p["4.weight"], p["4.bias"])

    check(model, by_hand, [torch.randn(4, 2, 4, 4)], format)


def test_results_that_are_not_used_have_no_gradient(seed):
    x = torch.randn(4, 6)
    found = []
    for parts in (lambda y: y.split(3, -1)[0], lambda y: y[..., :3]):  # y[:, :3] is two nodes in older torch
        leaf = x.clone().requires_grad_()
        with region("e8m3"):
            parts(leaf * 1.25).square().sum().backward()
        found.append(leaf.grad)
    assert torch.equal(*found)
    assert not found[0][:, 3:].any()
    assert found[0][:, :3].all()


class Attention(nn.Module):
    """Written out, with a residual: tensors with several uses."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.qkv = nn.Linear(8, 24)
        self.out = nn.Linear(8, 8, bias=False)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).split(8, dim=-1)
        a = torch.softmax(q @ k.transpose(1, 2) * 0.25, dim=-1)
        return x + self.out(a @ v)


def test_attention(seed, format):
    def by_hand(op, p, x):
        h = op(lambda a, w, b: F.layer_norm(a, (8,), w, b), x, p["norm.weight"], p["norm.bias"])
        h = op(F.linear, h, p["qkv.weight"], p["qkv.bias"])
        q, k, v = h.split(8, dim=-1)
        scores = op(torch.mul, op(torch.matmul, q, k.transpose(1, 2)), 0.25)
        a = op.softmax(scores)
        return op(torch.add, x, op(F.linear, op(torch.matmul, a, v), p["out.weight"]))

    check(Attention(), by_hand, [torch.randn(3, 5, 8)], format)


def test_fused_attention_is_one_operator(seed, format):
    class Model(nn.Module):
        def forward(self, q, k, v):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    class Fused(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            out, statistics = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
            out = nearest(out, FORMATS[format])
            ctx.save_for_backward(q, k, v, out, statistics)
            return out

        @staticmethod
        def backward(ctx, gradient):
            backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
            return backward(gradient, *ctx.saved_tensors, 0.0, True)

    check(Model(), lambda op, p, *qkv: op(Fused.apply, *qkv), [torch.randn(1, 2, 6, 4) for _ in range(3)], format)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        return self.head(torch.tanh(self.embedding(torch.arange(9)) * x))


def test_tied_weights(seed, format):
    def by_hand(op, p, x):
        w = p["embedding.weight"]
        h = op.tanh(op(torch.mul, op(lambda w: F.embedding(torch.arange(9), w), w), x))
        return op(F.linear, h, w)

    check(Tied(), by_hand, [torch.randn(9, 6)], format)


def test_three_uses(seed, format):
    """A sum of three gradients is rounded once."""

    class Model(nn.Module):
        def forward(self, x):
            y = torch.exp(x)
            return torch.cat([y * 1.3, torch.sin(y), y * y], dim=1)

    def by_hand(op, p, x):
        y = op.exp(x)
        return op(lambda *t: torch.cat(t, 1), op(torch.mul, y, 1.3), op(torch.sin, y), op(torch.mul, y, y))

    check(Model(), by_hand, [torch.randn(6, 4)], format)


@pytest.mark.parametrize("shape", [(6, 4), (2, 3, 4)])
def test_in_place_relu(seed, format, shape):
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 8), nn.Hardtanh(inplace=True))

    def by_hand(op, p, x):
        h = op(F.relu, op(F.linear, x, p["0.weight"], p["0.bias"]))
        return op(F.hardtanh, op(F.linear, h, p["2.weight"], p["2.bias"]))

    check(model, by_hand, [torch.randn(shape)], format)


def test_in_place_on_a_view(seed, format):
    class Model(nn.Module):
        def forward(self, x):
            y = x * 1.7
            y[:, 0].mul_(0.3)
            return y.exp_()

    def by_hand(op, p, x):
        y = op(torch.mul, x, 1.7)
        first = op(torch.mul, y[:, :1], 0.3)
        return op.exp(torch.cat([first, y[:, 1:]], dim=1))

    check(Model(), by_hand, [torch.randn(5, 3)], format)


def test_written_through_a_view_and_returned(seed, format):
    class Model(nn.Module):
        def forward(self, x):
            y = x * 1.7
            y[:, 0].mul_(0.3)
            y.t()[1:].exp_()
            return y

    def by_hand(op, p, x):
        y = op(torch.mul, x, 1.7)
        first = op(torch.mul, y[:, :1], 0.3)
        return torch.cat([first, op.exp(y[:, 1:])], dim=1)

    check(Model(), by_hand, [torch.randn(5, 3)], format)


def test_broadcast_bias(seed, format):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.randn(4))

        def forward(self, x):
            return x * self.scale

    check(Model(), lambda op, p, x: op(torch.mul, x, p["scale"]), [torch.randn(6, 4)], format)


def test_custom_function_is_one_operator(seed, format):
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            y = x**3
            return y

        @staticmethod
        def backward(ctx, gradient):
            (x,) = ctx.saved_tensors
            return 3 * x**2 * gradient

    class Model(nn.Module):
        def forward(self, x):
            return Cube.apply(x) + x

    check(Model(), lambda op, p, x: op(torch.add, op(Cube.apply, x), x), [torch.randn(6)], format)


def test_custom_function_that_goes_on_after_its_result(seed, format):
    """Its node is found although the last operator inside made something else."""

    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            y = x * 1.3
            ctx.mask = (x > 0).float() * 0.7
            return y

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 1.3 + ctx.mask

    class Model(nn.Module):
        def forward(self, x):
            return Scale.apply(x)

    x = torch.randn(50, requires_grad=True)
    emulate(Model(), format)(x).sum().backward()
    mask = nearest((x > 0).float() * 0.7, FORMATS[format])
    assert torch.equal(x.grad, nearest(1.3 + mask, FORMATS[format]))


def test_accumulation_is_rounded(seed, format):
    bits = FORMATS[format]
    model = nn.Linear(6, 3)
    emulate(model, format)
    total = torch.zeros(3, 6)
    for _ in range(4):
        x = torch.randn(5, 6)
        model(x).sum().backward()
        total = nearest(total + nearest(torch.ones(3, 5) @ nearest(x, bits), bits), bits)
        assert torch.equal(model.weight.grad, total)


def test_leaves_that_come_and_go_in_one_region_are_all_rounded():
    """A new tensor may have the address, and so the id, of one that is gone."""
    with region("e8m2"):
        for _ in range(20):
            x = torch.ones(6, requires_grad=True)
            (x * 1.3 + x * 2.7 + x * 0.11).sum().backward()
            assert x.grad.tolist() == [4] * 6
            del x


def test_a_stored_tensor_keeps_its_roundings(seed, format):
    """An auxiliary loss that the model does not return."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            h = self.layer(x)
            self.extra = torch.sin(h) * 1.3
            return h

    model = Model()
    emulate(model, format)
    x = nearest(torch.randn(3, 4), FORMATS[format])
    model(x)
    g = torch.randn(3, 4)
    model.extra.backward(g)

    def r(t):
        return nearest(t, FORMATS[format])

    with torch.no_grad():
        h = r(model.layer(x))
        dh = r(r(r(g) * 1.3) * torch.cos(h))
    assert torch.equal(model.layer.weight.grad, r(dh.T @ x))


def test_backward_pass_after_removal_and_twice(seed, format):
    bits = FORMATS[format]
    model = nn.Linear(4, 4)
    handle = emulate(model, format)
    x = torch.randn(3, 4, requires_grad=True)
    out = model(x).sum()
    handle.remove()
    first = torch.autograd.grad(out, [x, model.weight], retain_graph=True)
    second = torch.autograd.grad(out, [x, model.weight])
    for a, b in zip(first, second):
        assert torch.equal(a, b)
        assert torch.equal(a, nearest(a, bits))


def test_hooks_on_parameters_fire_once(seed, format):
    model = nn.Linear(4, 4)
    emulate(model, format)
    calls = []
    model.weight.register_hook(lambda g: calls.append(g.clone()))
    model(torch.randn(3, 4)).sum().backward()
    assert len(calls) == 1
    assert torch.equal(calls[0], model.weight.grad)


def test_a_hook_may_take_the_gradient_away():
    """As optimizers that step within the backward pass do, from a hook that was there first."""
    x = torch.tensor([1.3, 2.7], requires_grad=True)
    taken = []

    def take_gradient(leaf):
        taken.append(leaf.grad)
        leaf.grad = None

    x.register_post_accumulate_grad_hook(take_gradient)
    with region("e8m1"):
        y = (x * x).sum()
    y.backward()
    assert torch.equal(taken[0], torch.tensor([3.0, 6.0]))
    assert x.grad is None


def test_a_leaf_without_a_gradient_keeps_none():
    class PassFirst(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, y):
            return x + y

        @staticmethod
        def backward(ctx, gradient):
            return gradient, None

    x, y = (torch.tensor([1.3, 2.7], requires_grad=True) for _ in range(2))
    with region("e8m1"):
        out = PassFirst.apply(x, y).sum()
    out.backward()
    assert torch.equal(x.grad, torch.ones(2))
    assert y.grad is None


def test_a_plain_backward_pass_is_left_alone(seed):
    """While an emulated graph is alive, gradients that do not pass through it are not rounded."""
    model = nn.Linear(4, 4)
    handle = emulate(model, "e8m1")
    alive = model(torch.randn(3, 4)).sum()
    alive.backward(retain_graph=True)
    handle.remove()
    model.zero_grad()
    model(torch.randn(3, 4)).sum().backward()
    assert not torch.equal(model.weight.grad, nearest(model.weight.grad, 1))


def test_nothing_is_left_when_the_graph_goes(seed):
    model = nn.Linear(4, 4)
    handle = emulate(model, "e8m1")
    for _ in range(3):
        model(torch.randn(3, 4)).sum().backward()
    assert not model.weight._post_accumulate_grad_hooks
    del handle


def test_create_graph_is_refused():
    x = torch.randn(3, requires_grad=True)
    with region("bf16"):
        y = (x * x).sum()
    with pytest.raises(NotImplementedError, match="create_graph"):
        torch.autograd.grad(y, x, create_graph=True)


def test_sparse_gradients_are_refused():
    model = nn.Embedding(5, 2, sparse=True)
    emulate(model, "bf16")
    with pytest.raises(NotImplementedError, match=r"EmbeddingBackward0.*sparse"):
        model(torch.tensor([1, 2])).sum().backward()
