"""Gradients of MCTensors: float64's, in the first component's dtype or with all components."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from halfulp.mctensor import MCTensor
from halfulp.subclass import strict

from .exact_values import exact

FORMATS = [(torch.float32, 2), (torch.float64, 2), (torch.bfloat16, 2), (torch.float16, 2)]
FIRST = {torch.float32: 2.0**-20, torch.float64: 2.0**-46, torch.bfloat16: 2.0**-5, torch.float16: 2.0**-8}
ALL = {torch.float32: 2.0**-40, torch.float64: 2.0**-46, torch.bfloat16: 2.0**-11, torch.float16: 2.0**-15}

pytestmark = pytest.mark.filterwarnings(
    "ignore:.torch.jit:DeprecationWarning", "ignore::halfulp.subclass.FallbackWarning"
)


class Network(nn.Module):
    """A little of everything."""

    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(1, 4, 3, padding=1, bias=False)
        self.normal = nn.BatchNorm2d(4)
        self.linear = nn.Linear(64, 8)
        self.layer_norm = nn.LayerNorm(8)
        self.embedding = nn.Embedding(5, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.recurrent = nn.GRU(8, 8, batch_first=True)
        self.out = nn.Linear(8, 3)

    def forward(self, images, tokens):
        h = F.avg_pool2d(F.gelu(self.normal(self.convolution(images))), 2).flatten(1)
        h = self.layer_norm(self.linear(h))[:, None] + self.embedding(tokens)
        h = self.attention(h, h, h, need_weights=False)[0]
        return self.out(self.recurrent(h)[0]).mean(1)


def _convert(model, dtype, components, gradients):
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                made = MCTensor.encode(parameter.detach(), components, dtype, gradients=gradients)
                module._parameters[name] = nn.Parameter(made)
        for name, buffer in module._buffers.items():
            module._buffers[name] = buffer.to(dtype) if buffer.is_floating_point() else buffer
        if isinstance(module, nn.RNNBase):
            module._flat_weights = [getattr(module, name) for name in module._flat_weights_names]
    return model


def _value(gradient):
    return gradient.decode() if isinstance(gradient, MCTensor) else gradient.double()


@pytest.mark.parametrize("gradients", ["first", "components"])
@pytest.mark.parametrize(("dtype", "components"), FORMATS)
def test_a_network_has_float64s_gradients(dtype, components, gradients, seed):
    model, reference = Network(), Network().double()
    _convert(model, dtype, components, gradients)
    for parameter, wanted in zip(model.parameters(), reference.parameters()):
        wanted.data = parameter.detach().decode()
    images, tokens = torch.randn(6, 1, 8, 8).to(dtype), torch.randint(0, 5, (6, 3))
    labels = torch.randint(0, 3, (6,))
    with contextlib.nullcontext() if dtype == torch.float64 else strict():
        loss = F.cross_entropy(model(images, tokens), labels)
        loss.backward()
    scores = reference(images.double(), tokens)
    wanted = F.cross_entropy(scores, labels)
    wanted.backward()
    assert abs(loss.item() - wanted.item()) <= ALL[dtype]
    bound = (FIRST if gradients == "first" else ALL)[dtype]
    # The images' shares in a gradient may cancel.
    terms = (scores.detach().softmax(1) - F.one_hot(labels, 3)).abs().mean(0).max()
    largest = max(terms, *(parameter.grad.abs().max() for parameter in reference.parameters()))
    for parameter, target in zip(model.parameters(), reference.parameters()):
        assert type(parameter.grad) is (torch.Tensor if gradients == "first" else MCTensor)
        assert parameter.grad.dtype == dtype
        assert (_value(parameter.grad) - target.grad).abs().max() <= bound * largest


@pytest.mark.parametrize("gradients", ["first", "components"])
@pytest.mark.parametrize(("dtype", "components"), FORMATS)
def test_a_pooled_maximum_passes_its_gradient_to_one_place(dtype, components, gradients, seed):
    values, weight = torch.randperm(64).double().reshape(1, 1, 8, 8), torch.randn(1, 1, 4, 4).to(dtype)
    x = MCTensor.encode(values, components, dtype, gradients=gradients).requires_grad_()
    (F.max_pool2d(x, 2) * weight).sum().backward()
    values.requires_grad_()
    (F.max_pool2d(values, 2) * weight.double()).sum().backward()
    assert torch.equal(_value(x.grad), values.grad)


@pytest.mark.parametrize("function", [torch.sum, torch.mean, lambda x: x[0, 0], lambda x: x.T.reshape(-1)[:2].sum()])
def test_gradients_that_are_only_views_reach_the_leaf_as_it_keeps_them(function):
    for gradients, kind in (("first", torch.Tensor), ("components", MCTensor)):
        x = MCTensor.encode(torch.randn(2, 3), gradients=gradients).requires_grad_()
        function(x).backward()
        assert type(x.grad) is kind
        function(x).backward()
        assert type(x.grad) is kind


@pytest.mark.parametrize(("gradients", "bound"), [("first", 2.0**-18), ("components", 2.0**-38)])
def test_double_backward(gradients, bound):
    values = torch.tensor([0.5, 2.0, -1.0], dtype=torch.float64)

    def second(x):
        (first,) = torch.autograd.grad((x**3).sum() + x.exp().sum(), x, create_graph=True)
        return torch.autograd.grad((first * first).sum(), x)[0]

    found = second(MCTensor.encode(values, 2, torch.float32, gradients=gradients).requires_grad_())
    wanted = second(values.clone().requires_grad_())
    assert (_value(found) - wanted).abs().max() <= bound * wanted.abs().max()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_computes_the_forward_with_all_components(reentrant, seed):
    weight = MCTensor.encode(torch.randn(4, 4, dtype=torch.float64), 2, torch.float32)
    x = MCTensor.encode(torch.randn(3, 4, dtype=torch.float64), 2, torch.float32).requires_grad_()

    def function(x):
        return (x @ weight).exp().tanh()

    (wanted,) = torch.autograd.grad(function(x).sum(), x)
    checkpoint(function, x, use_reentrant=reentrant).sum().backward()
    assert torch.equal(x.grad, wanted)


@pytest.mark.parametrize("gradients", ["first", "components"])
def test_plain_leaves_get_plain_gradients(gradients, seed):
    plain = torch.randn(3, 4, requires_grad=True)
    offset = torch.randn(2, requires_grad=True)
    weight = nn.Parameter(MCTensor.encode(torch.randn(4, 2), 2, gradients=gradients))
    for _ in range(2):
        (plain @ weight + offset).square().sum().backward()
        (offset + weight).sum().backward()
        assert type(plain.grad) is torch.Tensor
        assert type(offset.grad) is torch.Tensor
        assert type(weight.grad) is (torch.Tensor if gradients == "first" else MCTensor)


@pytest.mark.parametrize("gradients", ["first", "components"])
def test_gradients_pass_through_encode_and_decode(gradients):
    plain = torch.tensor([0.3, 0.6], dtype=torch.float64, requires_grad=True)
    x = MCTensor.encode(plain, 3, torch.bfloat16, gradients=gradients)
    (x * x).decode().sum().backward()
    assert torch.allclose(plain.grad, 2 * plain.detach(), rtol=2.0**-7)
    leaf = MCTensor.encode(["0.1"], 2, torch.float32, gradients=gradients).requires_grad_()
    (leaf.decode(torch.float64) * (1 + 2.0**-40)).sum().backward()
    kept = 1 + 2.0**-40 if gradients == "components" else 1.0
    assert float(_value(leaf.grad)) == kept


def test_a_gradient_passes_from_one_encoding_to_another_with_all_its_digits():
    x = MCTensor.encode("0.1", 3, torch.float32, gradients="components").requires_grad_()
    third = MCTensor.encode("1/3", 3, torch.float32)
    (MCTensor.encode(x, 3, torch.float32, gradients="components") * third).backward()
    assert exact(x.grad) == exact(third)


@pytest.mark.parametrize("gradients", ["first", "components"])
def test_in_place_writes_and_views_are_part_of_the_graph(gradients, seed):
    values = torch.randn(5, 4, dtype=torch.float64)

    def function(x):
        y = x * 1
        y[0].mul_(2)
        y[:, 1] = x[:, 2] * x[:, 0]
        y.T[3].add_(x[:, 3] ** 2)
        return (y * y).sum()

    found = MCTensor.encode(values, 2, torch.float32, gradients=gradients).requires_grad_()
    wanted = values.clone().requires_grad_()
    function(found).backward()
    function(wanted).backward()
    assert (_value(found.grad) - wanted.grad).abs().max() <= 2.0**-20 * wanted.grad.abs().max()


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True}),
        (torch.optim.Adam, {"lr": 0.1, "amsgrad": True}),
        (torch.optim.AdamW, {"lr": 0.1}),
        (torch.optim.RMSprop, {"lr": 0.1, "centered": True, "momentum": 0.1}),
        (torch.optim.Adagrad, {"lr": 0.1}),
        (torch.optim.NAdam, {}),
    ],
)
def test_torchs_optimizers_train_them(kind, options, foreach):
    found = nn.Parameter(MCTensor.encode(torch.tensor([1.0, 2.0, 3.0]), 2, gradients="components"))
    wanted = nn.Parameter(torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))
    for parameter in (found, wanted):
        optimizer = kind([parameter], **options, foreach=foreach)
        for _ in range(3):
            optimizer.zero_grad()
            ((parameter - 1.5) ** 2).sum().backward()
            optimizer.step()
    assert isinstance(found, MCTensor)
    assert (found.detach().decode() - wanted.detach()).abs().max() < 2.0**-38


def test_functional_transforms(seed):
    a, v = MCTensor.encode(torch.randn(3, 4, 5), 2), MCTensor.encode(torch.randn(5), 2)
    mapped = torch.vmap(lambda m: (m @ v).exp().sum())(a)
    assert (mapped.decode() - (a @ v).exp().sum(-1).decode()).abs().max() <= 2.0**-40 * mapped.decode().abs().max()
    gradient = torch.func.grad(lambda t: (t * t).sum())(v)
    assert (_value(gradient) - 2 * v.decode()).abs().max() <= 2.0**-20
    each = torch.vmap(torch.func.grad(lambda t: (t**3).sum()))(a[0])
    assert each.shape == (4, 5)
    value, tangent = torch.func.jvp(lambda t: t * t, (v,), (v,))
    assert (tangent - 2 * value).decode().abs().max() <= 2.0**-40


def test_a_hook_reads_all_digits_of_an_operand_with_component_gradients():
    other, seen = MCTensor.encode("0.1", 2, torch.float64), []
    x = MCTensor.encode(torch.ones(2), 2).requires_grad_()
    y = x * 2
    y.register_hook(lambda _: seen.append(MCTensor.encode(other, gradients="components") * 3))
    (y * y).sum().backward()
    assert type(x.grad) is torch.Tensor
    assert torch.equal(seen[0].components[1], (other * 3).components[1])
