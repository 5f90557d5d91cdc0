"""Scaled models inside torch.compile: one graph, the same numbers, no graph more as scales or batches change."""

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import functional

from halfulp.scaled import ScaledTensor, scalify
from halfulp.subclass import strict
from halfulp.trials.tasks._text import GPT

from ..samples import drawn

# torch's own compilers use what torch warns of.
pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.filterwarnings(
        "ignore:`torch.jit:DeprecationWarning", "ignore:.*should not be instantiated:DeprecationWarning"
    ),
]


def _mlp(bias: bool = True) -> nn.Module:
    norm = nn.LayerNorm(32, elementwise_affine=bias)
    return nn.Sequential(nn.Linear(16, 32, bias), norm, nn.ReLU(), nn.Linear(32, 8, bias))


def _mlp_batch(rows: int = 24) -> tuple:
    return torch.randn(rows, 16), torch.randint(0, 8, (rows,))


def _gpt() -> nn.Module:
    return GPT(17, width=16, layers=1, heads=2, time=12, fused=True)


def _gpt_batch(rows: int = 3) -> tuple:
    return torch.randint(0, 17, (rows, 12)), torch.randint(0, 17, (rows, 12))


def _loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model(x).flatten(0, -2), y.flatten())


def _gradients(loss: torch.Tensor, model: nn.Module) -> list[torch.Tensor]:
    for p in model.parameters():
        p.grad = None
    loss.backward()
    grads = [p.grad for p in model.parameters()]
    assert all(isinstance(g, ScaledTensor) for g in grads)
    return [loss.detach().decode(), *(g.detach().decode() for g in grads)]


def _distance(found: list, expected: list) -> float:
    return max(((a - b).norm() / b.norm().clamp(min=1e-30)).item() for a, b in zip(found, expected, strict=True))


def _graphs() -> int:
    return counters["stats"]["unique_graphs"]


MODELS = {"mlp": (_mlp, _mlp_batch), "gpt": (_gpt, _gpt_batch)}
TOLERANCES = {torch.float32: 2e-6, torch.float16: 2e-2, torch.bfloat16: 1e-1}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("mlp", dtype) for dtype in drawn([torch.float32, torch.bfloat16], 1, "one graph")] + [("gpt", torch.float16)],
    ids=str,
)
def test_one_graph_forward_and_backward_with_the_loss_inside(name, dtype, seed):
    make, batch = MODELS[name]
    model, given = scalify(make(), dtype), batch()
    with strict():
        expected = _gradients(_loss(model, *given), model)
        compiled = torch.compile(_loss, fullgraph=True, backend="aot_eager")
        found = _gradients(compiled(model, *given), model)
    assert _graphs() == 1
    assert _distance(found, expected) <= TOLERANCES[dtype]
    assert [p.grad._payload.dtype for p in model.parameters()] == [dtype] * len(list(model.parameters()))


def test_products_gates_and_norms_without_constants_have_the_bits_of_eager(seed):
    model, (x, _) = scalify(_mlp(bias=False), torch.float32), _mlp_batch()
    gradient = ScaledTensor.encode(torch.randn(24, 8), torch.float32)
    results = []
    for run in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        model.zero_grad()
        y = run(x)
        y.backward(gradient)
        results.append([y.detach().decode(), *(p.grad.detach().decode() for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_loss_outside_the_compiled_model(seed):
    model, (x, y) = scalify(_mlp(), torch.float32), _mlp_batch()
    expected = _gradients(_loss(model, x, y), model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert _distance(_gradients(functional.cross_entropy(compiled(x), y), model), expected) <= TOLERANCES[torch.float32]


@pytest.mark.parametrize("dtype", drawn([torch.float32, torch.float16], 1, "scales"), ids=str)
def test_scales_change_without_another_graph(dtype, seed):
    model, (x, y) = scalify(_mlp(), dtype), _mlp_batch()
    compiled = torch.compile(_loss, fullgraph=True, backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _gradients(compiled(model, x, y), model)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for exponent in (-20, 0, 20):
            optimizer.step()
            with torch.no_grad():
                for p in model.parameters():
                    p.data = p.detach().with_scale(p.scale * 2.0 ** (exponent // 10))
            found = _gradients(compiled(model, x * 2.0**exponent, y), model)
            expected = _gradients(_loss(model, x * 2.0**exponent, y), model)
            assert _distance(found, expected) <= TOLERANCES[dtype]
    assert _graphs() == 1


def test_the_graph_does_not_ask_which_model_ran_before(seed):
    models = [scalify(_mlp(), torch.float32) for _ in range(2)]
    compiled = torch.compile(_loss, fullgraph=True, backend="aot_eager")
    given = _mlp_batch()
    compiled(models[0], *given)
    models[1](given[0])
    with torch._dynamo.config.patch(error_on_recompile=True):
        compiled(models[0], *given)


def test_a_batch_as_large_as_a_layer_is_wide_takes_no_graph_of_its_own(seed):
    layer = scalify(torch.nn.Linear(6, 5), torch.float16, matmul="fp8")
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for rows in (8, 7):
        compiled(torch.randn(rows, 6)).sum().backward()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for rows in (5, 6, 9):
            compiled(torch.randn(rows, 6)).sum().backward()


DYNAMIC = [("mlp", None, 2), ("mlp", True, 1), ("gpt", True, 1)]


@pytest.mark.parametrize(("name", "dynamic", "graphs"), drawn(DYNAMIC, 1, "dynamic"))
def test_a_dynamic_batch_takes_one_graph_and_two_at_most(name, dynamic, graphs, seed):
    make, batch = MODELS[name]
    model = scalify(make(), torch.float32)
    compiled = torch.compile(_loss, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for rows in (100, 64, 7):
        given = batch(rows)
        found = _gradients(compiled(model, *given), model)
        assert _distance(found, _gradients(_loss(model, *given), model)) <= 1e-5
    assert _graphs() == graphs


def test_inductor_gives_the_same(seed, needs_torch):
    needs_torch("an embedding's compiled gradient that counts every index")
    model, given = scalify(_gpt(), torch.float32), _gpt_batch()
    compiled = torch.compile(_loss, fullgraph=True)
    expected = _gradients(_loss(model, *given), model)
    assert _distance(_gradients(compiled(model, *given), model), expected) <= 1e-5
    with torch._dynamo.config.patch(error_on_recompile=True), torch.no_grad():
        for p in model.parameters():
            p.data = p.detach().with_scale(p.scale * 4)
        torch.set_grad_enabled(True)
        assert _distance(_gradients(compiled(model, *given), model), expected) <= 1e-5


def test_a_write_that_does_not_fit_is_refused_as_it_runs(seed):
    def written(x: torch.Tensor, value: float) -> torch.Tensor:
        x = x.clone()
        x[:, 2:] = value
        return x

    compiled = torch.compile(written, backend="aot_eager", fullgraph=True)
    for exponent in (0, -20):
        x = ScaledTensor.encode(torch.randn(2, 4) * 2.0**exponent)
        with pytest.raises(RuntimeError, match="float16's range"):
            compiled(x, -1e9)
        assert torch.equal(compiled(x, -torch.inf).decode()[:, 2:], torch.full((2, 2), -torch.inf))


def test_plain_operands_have_the_same_values_in_a_graph(seed):
    add = torch.compile(lambda a, b: a + b, backend="aot_eager", fullgraph=True)
    for kind in ("ordinary", "tiny", "mask", "filled", "zeros", "infinite"):
        plain = torch.randn(6, 8) * (2.0**-80 if kind == "tiny" else 1.0)
        if kind in ("mask", "infinite"):
            plain[:, 5:] = -1e30 if kind == "mask" else -torch.inf
        if kind in ("filled", "zeros"):
            plain = torch.full((6, 8), -1e30 if kind == "filled" else 0.0)
        x = ScaledTensor.encode(torch.randn(6, 8) * (2.0**-80 if kind == "tiny" else 1.0))
        wanted, found = (x + plain).decode(), add(x, plain).decode()
        small = wanted.abs() < 100
        assert (found - wanted)[small].norm() <= 2e-3 * wanted[small].norm(), kind
        assert (found[~small] < -100).all(), kind
    assert _graphs() == 1


def test_a_huge_scale_of_data_decides_in_a_graph():
    add = torch.compile(lambda a, b: a + b, backend="aot_eager", fullgraph=True)
    for values, others in (([1e30, -3e30], [1e-25, 1e-25]), ([1.0, 2.0], [-1e30, -3e30]), ([2e7, 1.0], [1.0, 2e7])):
        x, y = (ScaledTensor.encode(torch.tensor(v)) for v in (values, others))
        assert torch.allclose(add(x, y).decode(), torch.tensor(values) + torch.tensor(others), rtol=1e-3)
    assert _graphs() == 1
    subtract = torch.compile(lambda a: a - 1e-8, backend="aot_eager", fullgraph=True)
    x = ScaledTensor.encode(torch.tensor([1e30, 4.5e30]), torch.float32)
    assert torch.allclose(subtract(x).decode(), x.decode())


def test_masks_of_scaled_tensors_decide_nothing_in_a_graph():
    add = torch.compile(lambda a, b: a + b, backend="aot_eager", fullgraph=True)
    mask = torch.tensor([0.0, 0.0, torch.finfo(torch.float32).min, -3e38])
    for size in (1.0, 1e-6):
        scores = torch.tensor([1.0, 2.0, 3.0, 4.0]) * size
        masked = add(*map(ScaledTensor.encode, (scores, mask)))
        assert (masked.decode()[2:] <= -128).all()
        assert torch.allclose(masked.decode()[:2], scores[:2], rtol=1e-2)


def test_what_full_like_made_decides_nothing_in_a_graph():
    x, keep = ScaledTensor.encode(torch.tensor([0.5, 0.75])), torch.tensor([True, False])
    for number in (-1e9, -1e30, torch.finfo(torch.float32).min):
        for fill in (torch.full_like, lambda a, number: a.new_full((1,), number)):
            run = lambda a, fill=fill, number=number: torch.where(keep, a, fill(a, number))  # noqa: E731
            masked = torch.compile(run, backend="aot_eager", fullgraph=True)(x)
            assert masked[0].item() == 0.5
            assert masked[1].item() <= -128
