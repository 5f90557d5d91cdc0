"""Models and functions on scaled tensors: conversion, inputs, and the way back."""

import copy
import gc
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import halfulp as hu
from halfulp.kernels import same_bits
from halfulp.scaled import ScaledTensor, unscalify
from halfulp.subclass import strict

from ...samples import drawn


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 3))


def gradients(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    assert loss.isfinite()
    return [p.grad.decode() if isinstance(p.grad, ScaledTensor) else p.grad for p in model.parameters()]


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-6), (torch.float16, 1e-2), (torch.bfloat16, 5e-2)])
@pytest.mark.parametrize("size", [2.0**-8, 1.0, 2.0**10])
def test_loss_and_gradients_are_those_of_the_plain_model(dtype, most, size, seed):
    plain = net()
    with torch.no_grad():
        plain[0].weight.mul_(size)
    x, y = torch.randn(32, 8), torch.randint(3, (32,))
    model = hu.scalify(copy.deepcopy(plain), dtype)
    assert all(isinstance(p, ScaledTensor) and isinstance(p, nn.Parameter) for p in model.parameters())
    ours, wanted = (torch.cat([g.flatten() for g in gradients(m, x, y)]) for m in (model, plain))
    assert (ours - wanted).norm() <= most * wanted.norm()
    assert all(p.grad.payload.dtype == dtype for p in model.parameters())


def test_a_linear_model_has_the_same_bits(seed):
    plain = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    x = torch.randn(4, 8)
    model = hu.scalify(copy.deepcopy(plain), torch.float32)
    for m in (model, plain):
        m(x).sum().backward()
    for p, q in zip(model.parameters(), plain.parameters()):
        assert torch.equal(p.grad.decode(), q.grad)


def test_a_copy_and_a_pickle_train_as_the_model(seed):
    model = hu.scalify(net())
    x, y = torch.randn(4, 8), torch.randint(3, (4,))
    twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), model.to("cpu")]
    wanted = gradients(copy.deepcopy(model), x, y)
    for twin in twins:
        assert all(map(torch.equal, gradients(twin, x, y), wanted))
        assert list(twin.state_dict())[:2] == ["0.weight", "0.weight.payload_scale"]
    assert twins[0][0].weight is not model[0].weight


class Tied(nn.Module):
    """Shares a weight, takes nested arguments, and has parameters that carry no scale."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.steps = nn.Parameter(torch.arange(3), requires_grad=False)
        self.phase = nn.Parameter(torch.ones(2, dtype=torch.complex64))
        self.register_buffer("running", torch.ones(4))
        self.seen = None

    def forward(self, batch: dict, *, extra=None) -> torch.Tensor:
        return self.head(self.embed(batch["ids"]) + extra[0] * self.running)


def test_ties_arguments_and_what_has_no_scale(seed):
    model = hu.scalify(Tied())
    assert model.head.weight is model.embed.weight
    assert type(model.steps.data) is torch.Tensor
    assert type(model.phase.data) is torch.Tensor
    assert type(model.running) is torch.Tensor
    out = model({"ids": torch.tensor([1, 2])}, extra=[torch.ones(2, 4)])
    assert isinstance(out, ScaledTensor)
    F.mse_loss(out, torch.zeros(2, 5)).backward()
    assert isinstance(model.head.weight.grad, ScaledTensor)


class Clock(nn.Module):
    """Of times and a bias by position: what sixteen bits cannot hold."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 6)

    def forward(self, times: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return (self.layer(torch.stack([times.sin(), times.cos()], -1)) + bias).softmax(-1)


CLOCKS = [(torch.float32, 1e-6), (torch.float16, 2e-3), (torch.bfloat16, 2e-2)]
IN_GRAPH = drawn(CLOCKS, 1, "clocks")


@pytest.mark.parametrize(
    ("dtype", "most", "compiled"), [*((*one, False) for one in CLOCKS), *((*one, True) for one in IN_GRAPH)]
)
def test_what_a_model_is_given_keeps_its_digits(dtype, most, compiled, seed):
    plain = Clock()
    times, bias = 4000 + torch.arange(5.0), torch.randn(6)
    bias[3:] = torch.tensor([-1e9, torch.finfo(torch.float32).min, -torch.inf])
    model = hu.scalify(copy.deepcopy(plain), dtype)
    found = (torch.compile(model, backend="aot_eager") if compiled else model)(times, bias)
    assert isinstance(found, ScaledTensor)
    assert (found.detach().decode() - plain(times, bias)).abs().max() <= most


def test_where_chooses_by_name_or_function(seed):
    model = hu.scalify(net(), where="*.weight")
    assert isinstance(model[0].weight, ScaledTensor)
    assert type(model[0].bias) is nn.Parameter
    x, y = torch.randn(4, 8), torch.randint(3, (4,))
    gradients(model, x, y)
    start = model[0].bias.detach().clone()
    torch.optim.SGD(model.parameters(), 0.1).step()
    assert not torch.equal(model[0].bias, start)
    assert type(model[0].bias) is nn.Parameter
    only = hu.scalify(net(), where=lambda module, name: isinstance(module, nn.LayerNorm))
    assert [name for name, p in only.named_parameters() if isinstance(p, ScaledTensor)] == ["1.weight", "1.bias"]


def test_the_way_back(seed):
    start = net()
    x = torch.randn(4, 8)
    model = unscalify(hu.scalify(copy.deepcopy(start), torch.float32))
    assert torch.equal(model(x), start(x))
    assert list(model.state_dict()) == list(start.state_dict())
    for module in model.modules():
        assert not module._forward_pre_hooks
        assert not module._state_dict_hooks
        assert not module._load_state_dict_pre_hooks
        assert not [name for name in module.__dict__ if "halfulp" in name]
    half = unscalify(hu.scalify(nn.Linear(2, 2).to(torch.bfloat16)))
    assert half.weight.dtype == torch.bfloat16
    assert unscalify(hu.scalify(nn.Linear(2, 2)), torch.float64).weight.dtype == torch.float64


def test_gradients_and_marks_go_along(seed):
    model = net()
    model(torch.randn(2, 8)).sum().backward()
    model[0].weight.decay = 0.1
    wanted = model[0].weight.grad.clone()
    hu.scalify(model, torch.float32)
    assert torch.equal(model[0].weight.grad.decode(), wanted)
    assert model[0].weight.decay == 0.1
    unscalify(model)
    assert torch.equal(model[0].weight.grad, wanted)
    assert model[0].weight.decay == 0.1


def test_an_optimizer_that_exists_already_is_refused(seed):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    start = model[0].weight
    with pytest.raises(ValueError, match=r"SGD holds parameter '0.weight'.*after scalify"):
        hu.scalify(model)
    assert model[0].weight is start
    optimizer.loop = optimizer
    del optimizer  # still lies about, in a cycle
    hu.scalify(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(ValueError, match="after unscalify"):
        unscalify(model)
    del optimizer
    gc.collect()


def test_batch_norm_keeps_its_statistics_wide(seed):
    plain = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))
    model = hu.scalify(copy.deepcopy(plain))
    for _ in range(20):
        x = torch.randn(16, 4)
        model(x), plain(x)
    assert model[1].running_var.dtype == torch.float32
    assert type(model[1].running_var) is torch.Tensor
    torch.testing.assert_close(model[1].running_var, plain[1].running_var, rtol=1e-3, atol=1e-4)


def test_bad_input(seed):
    model = net()
    start = dict(model.named_parameters())
    for options, message in (
        ({"dtype": torch.int8}, "a payload is one of"),
        ({"dtype": torch.float64}, "a payload is one of"),
        ({"where": "*.wieght"}, "did you mean .*'0.weight'"),
        ({"matmul": "int8"}, "allowed are None and 'fp8'"),
        ({"rescale": "all"}, "allowed are 'auto', 'norms'"),
        ({"rescale": ["0"]}, "call hu.rescale"),
    ):
        with pytest.raises(ValueError, match=message):
            hu.scalify(model, **options)
    with pytest.raises(ValueError, match="sparse=False"):
        hu.scalify(nn.Embedding(4, 3, sparse=True))
    with pytest.raises(TypeError, match="the class Linear"):
        hu.scalify(nn.Linear)
    with pytest.raises(ValueError, match="has no shape yet"):
        hu.scalify(nn.LazyLinear(3))
    sparse = nn.Module()
    sparse.w = nn.Parameter(torch.eye(3).to_sparse())
    with pytest.raises(ValueError, match="scaled tensors are dense"):
        hu.scalify(sparse)
    with pytest.raises(ValueError, match="MCTensor"):
        hu.scalify(hu.multicomponent(nn.Linear(2, 2)))
    with pytest.raises(TypeError, match="a module or a function"):
        hu.scalify(3)
    with pytest.raises(ValueError, match="for models"):
        hu.scalify(torch.relu, where="x")
    with pytest.raises(ValueError, match="dtype="):
        unscalify(hu.scalify(net()), torch.int8)
    assert all(start[name] is p for name, p in model.named_parameters())


def test_scalify_again_changes_the_storage(seed):
    model = hu.scalify(hu.scalify(net(), torch.float32), torch.float16)
    assert model[0].weight.payload.dtype == torch.float16
    assert len(model._forward_pre_hooks) == 2
    assert model(torch.randn(2, 8)).payload.dtype == torch.float16


def test_eight_bit_products(seed):
    plain = net()
    model = hu.scalify(copy.deepcopy(plain), matmul="fp8")
    x, y = torch.randn(32, 8), torch.randint(3, (32,))
    ours, wanted = (torch.cat([g.flatten() for g in gradients(m, x, y)]) for m in (model, plain))
    sixteen = torch.cat([g.flatten() for g in gradients(hu.scalify(copy.deepcopy(plain)), x, y)])
    error, control = ((g - wanted).norm() / wanted.norm() for g in (ours, sixteen))
    assert control < 0.02 < error < 0.5
    twin = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    model.zero_grad()
    assert all(map(torch.equal, gradients(twin, x, y), gradients(model, x, y)))
    assert "forward" not in unscalify(model)[0].__dict__


@pytest.mark.parametrize("run", [lambda model: model, lambda model: torch.compile(model, backend="aot_eager")])
@pytest.mark.parametrize("make", [lambda: nn.Linear(4, 3), lambda: nn.Conv1d(4, 3, 1)])
def test_large_inputs_are_no_outliers(make, run, seed):
    plain = make()
    x = torch.rand(8, 4, 5) if isinstance(plain, nn.Conv1d) else torch.rand(8, 4)
    x[:, 2] += 1.7e9
    found = run(hu.scalify(copy.deepcopy(plain)))(x).detach().decode()
    assert (found - plain(x)).norm() <= 2e-3 * plain(x).norm()


@pytest.mark.parametrize("run", [lambda model: model, lambda model: torch.compile(model, backend="aot_eager")])
def test_plain_inputs_get_plain_gradients(run, seed):
    plain, x = nn.Linear(4, 3), torch.randn(5, 4, requires_grad=True)
    run(hu.scalify(copy.deepcopy(plain)))(x).sum().backward()
    assert type(x.grad) is torch.Tensor
    assert (x.grad - plain.weight.detach().sum(0)).norm() <= 5e-3 * x.grad.norm()


def test_plain_tensors_keep_their_digits_where_scaled_ones_are_added(seed):
    total, term = torch.zeros(()), hu.ScaledTensor.encode(torch.rand(()) + 0.5)
    for _ in range(3000):
        total += term
    assert total.item() == pytest.approx(3000 * term.item(), rel=1e-3)
    model = hu.scalify(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)), where="1.*")
    start = model[0].weight.detach().clone()
    model(torch.ones(2, 4)).sum().backward()
    grad = model[0].weight.grad
    torch.optim.SGD([model[0].weight], lr=1e-6).step()
    expected = start - 1e-6 * (grad.decode() if isinstance(grad, ScaledTensor) else grad)
    torch.testing.assert_close(model[0].weight.detach(), expected, rtol=1e-6, atol=1e-9)


def test_plain_in_plain_out_with_gradients(seed):
    def function(x, *, other, n):
        return {"y": (x @ other["w"]).relu() * n, "n": n}

    x, w = torch.randn(4, 8, requires_grad=True), torch.randn(8, 3)
    out = hu.scalify(function, torch.float32)(x, other={"w": w}, n=2)
    assert type(out["y"]) is torch.Tensor
    assert out["n"] == 2
    wanted = function(x.detach(), other={"w": w}, n=2)["y"]
    assert torch.equal(out["y"], wanted)
    out["y"].sum().backward()
    assert type(x.grad) is torch.Tensor
    twin = x.detach().requires_grad_()
    function(twin, other={"w": w}, n=2)["y"].sum().backward()
    assert torch.equal(x.grad, twin.grad)


def test_scaled_in_scaled_out(seed):
    x = ScaledTensor.encode(torch.randn(3))
    assert isinstance(hu.scalify(torch.relu)(x), ScaledTensor)
    ids = torch.tensor([1, 2])
    assert hu.scalify(lambda x: x)(ids) is ids


def test_a_training_step(seed):
    plain = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    x, y = torch.randn(64, 8), torch.randint(3, (64,))

    def step_of(model):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def step(x, y):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    ours = hu.scalify(step_of(hu.scalify(copy.deepcopy(plain))))
    theirs = step_of(plain)
    for _ in range(10):
        loss, wanted = ours(x, y), theirs(x, y)
        assert type(loss) is torch.Tensor
    assert loss == pytest.approx(wanted.item(), rel=5e-3)


def test_bad_functions():
    with pytest.raises(ValueError, match="a payload is one of"):
        hu.scalify(torch.relu, torch.int8)
    with pytest.raises(TypeError, match="a module or a function"):
        hu.scaled.scalify_function(None)


ROWS = 3
TRANSFORMS = {
    "grad": lambda f, x: grad(lambda x: f(x).sum())(x[0]),
    "vjp": lambda f, x: vjp(f, x)[1](torch.ones(ROWS, 2))[0],
    "jvp": lambda f, x: jvp(f, (x,), (torch.ones_like(x),))[1],
    "jacrev": lambda f, x: jacrev(f)(x[0]),
    "jacfwd": lambda f, x: jacfwd(f)(x[0]),
    "hessian": lambda f, x: hessian(lambda x: f(x).square().sum())(x[0]),
    "vmap": lambda f, x: vmap(f)(x),
    "vmap of grad": lambda f, x: vmap(grad(lambda x: f(x).sum()))(x),
    "jacrev of jacrev": lambda f, x: jacrev(jacrev(lambda x: f(x).square().sum()))(x[0]),
    "autograd": lambda f, x: torch.autograd.functional.jacobian(f, x[0]),
}


def _net():
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 2))


def _values(x):
    return (x.decode() if isinstance(x, ScaledTensor) else x).detach()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own, as it loads its formulas
@pytest.mark.parametrize("storage", drawn([torch.float32, torch.float16], 1, "transforms"), ids=str)
def test_transforms_with_respect_to_inputs(storage, seed):
    plain, x = _net(), torch.randn(ROWS, 4)
    scaled = hu.scalify(copy.deepcopy(plain), storage)
    for name, transform in TRANSFORMS.items():
        expected = _values(transform(plain, x))
        for model in (scaled, lambda x: copy.deepcopy(scaled)(x)):
            with strict():
                found = _values(transform(model, x))
            most = 1e-5 if storage == torch.float32 else 3e-2
            assert (found - expected).norm() <= most * expected.norm(), name


def test_a_copy_inside_a_transform_is_the_model(seed):
    model, kept = hu.scalify(_net()), []
    vmap(lambda x: kept.append(copy.deepcopy(model)) or x)(torch.randn(2, 4))
    grad(lambda x: (kept.append(copy.deepcopy(model)) or x).sum())(torch.randn(4))
    for other in kept:
        for a, b in zip(other.parameters(), model.parameters(), strict=True):
            assert a.requires_grad
            assert a.is_leaf
            assert same_bits(a.payload, b.payload)
            assert same_bits(a.scale, b.scale)
        other(torch.randn(2, 4)).sum().backward()
