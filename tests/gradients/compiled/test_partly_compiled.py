"""Models of which torch.compile takes a part only: exact, never in silence."""

import random
from collections import OrderedDict

import pytest
import torch
from torch import nn

import halfulp as hu
from halfulp._torch_floor import is_older

# torch's own compilers use what torch warns of.
pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.filterwarnings(
        "ignore:`torch.jit:DeprecationWarning", "ignore:.*should not be instantiated:DeprecationWarning"
    ),
    # Dynamo looks at what it is given.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]


class Parts(nn.Module):
    def __init__(self, between=torch.sin):
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.inner, self.between = nn.Sequential(nn.Linear(6, 6), nn.ReLU()), between

    def forward(self, x):
        return self.last(self.between(self.inner(self.first(x))))


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


def _gradients(run, model: nn.Module, scaler: hu.AdaptiveGradScaler | None = None) -> list[torch.Tensor]:
    """The true gradients of the parameters."""
    torch.manual_seed(0)
    loss = run(torch.randn(5, 6)).square().sum()
    scaled = loss if scaler is None else scaler.scale(loss)
    found = torch.autograd.grad(scaled, list(model.parameters()))
    return [x if scaler is None else x / scaler.get_scale() for x in found]


def _check_exact(run, model: nn.Module, scaler: hu.AdaptiveGradScaler, expected: list[torch.Tensor]) -> None:
    for _ in range(3):
        found = _gradients(run, model, scaler)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        scaler.set_exponents({row.site: random.randint(-12, 24) for row in scaler.sites()})


@pytest.mark.parametrize("part", ["module", "module in place", "function", "custom function"])
def test_a_part_that_is_compiled_by_itself_is_refused(part, seed):
    graphs = []

    def compiled(what, compile=torch.compile):
        return compile(what, backend=lambda module, _: graphs.append(module) or module)

    between = Doubled.apply if part == "custom function" else torch.sin
    model = Parts(between)
    scaler = hu.AdaptiveGradScaler(model)
    match part:
        case "module":
            model.inner = compiled(model.inner)
        case "module in place":
            compiled(model.inner, nn.Module.compile)
        case _:
            model.between = compiled(lambda x: between(x))
    refusals, said = [NotImplementedError], r"compiled by itself.*compile the whole model"
    if part == "custom function" and is_older(torch.__version__, "2.11"):  # whose compiler may stumble first
        refusals, said = [*refusals, torch._dynamo.exc.InternalTorchDynamoError], f"{said}|is not a constant"
    with pytest.raises(tuple(refusals), match=said):
        _gradients(model, model, scaler)
    assert not graphs


def test_a_part_that_torch_must_compile_is_refused(seed):
    model = Parts()
    hu.AdaptiveGradScaler(model)
    model.inner = torch.compile(model.inner, backend="eager", fullgraph=True)
    # Older versions of torch leave out what it refuses for; the warning says it.
    older = is_older(torch.__version__, "2.11")
    said = "Observed exception" if older else r"compiled by itself.*compile the whole model"
    refused = pytest.raises(torch._dynamo.exc.Unsupported, match=said)
    with refused:
        model(torch.randn(5, 6))


def test_what_breaks_out_of_a_graph_is_named(seed):
    model = Parts()
    expected = _gradients(model, model)
    model.inner.forward = torch.compiler.disable(model.inner.forward)
    scaler = hu.AdaptiveGradScaler(model)
    compiled = torch.compile(model, backend=scaler.backend("aot_eager"))
    with pytest.warns(UserWarning, match=r"leaves 'inner\.0' uncompiled.*fullgraph=True"):
        _check_exact(compiled, model, scaler, expected)
    assert [row.site for row in scaler.sites()] == ["global", "first", "last"]


@pytest.mark.parametrize("before", [False, True])
def test_a_model_that_is_compiled_whole_gives_no_warning(before, recwarn, seed):
    """Nor does one that runs uncompiled before it."""
    first, model = nn.Linear(6, 6), Parts()
    scaler = hu.AdaptiveGradScaler([first, model])
    compiled = torch.compile(model, backend=scaler.backend("aot_eager"))
    _gradients((lambda x: compiled(first(x))) if before else compiled, model, scaler)
    assert not [one for one in recwarn if one.category is UserWarning]


def test_a_compiled_model_whose_one_layer_is_called_global_gives_no_warning(recwarn, seed):
    model = nn.Sequential(OrderedDict({"global": nn.Linear(6, 6)}))
    scaler = hu.AdaptiveGradScaler(model)
    compiled = torch.compile(model, backend=scaler.backend("aot_eager"))
    scaler.scale(compiled(torch.randn(5, 6)).square().sum()).backward()
    scaler.step(torch.optim.SGD(model.parameters()))
    assert not [one for one in recwarn if one.category is UserWarning]
