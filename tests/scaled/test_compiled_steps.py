"""Compiling a whole step, an optimizer's step, and any subset of outputs: what eager gives, with either tensor."""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch._dynamo.utils import clear_compilation_metrics, get_compilation_metrics

import halfulp as hu
from halfulp.mctensor import MCTensor, multicomponent
from halfulp.scaled import ScaledTensor, scalify
from halfulp.subclass import strict

from ..samples import drawn

# torch's own compilers use what torch warns of.
pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.filterwarnings(
        "ignore:`torch.jit:DeprecationWarning", "ignore:.*should not be instantiated:DeprecationWarning"
    ),
    # What dynamo asks of a tensor between two graphs.
    pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning"),
]
_LIBRARY = hu.__path__[0]
KINDS = {"scaled": lambda model: scalify(model, torch.float16), "components": lambda model: multicomponent(model, 2)}


def _value(x: torch.Tensor) -> torch.Tensor:
    return x.detach().decode(torch.float64) if isinstance(x, ScaledTensor | MCTensor) else x.detach().double()


class Recurrent(nn.Module):
    def __init__(self, layer: type[nn.RNNBase]):
        super().__init__()
        self.layer, self.head = layer(3, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.layer(x)[0])


def _trained(model: nn.Module, compiled: bool, batches: list) -> list[torch.Tensor]:
    """The losses of some steps, and the parameters after them."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(x, y):
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    run = torch.compile(step, backend="aot_eager") if compiled else step
    return [_value(run(*batch)) for batch in batches] + [_value(p) for p in model.parameters()]


@pytest.mark.parametrize(
    ("layer", "kind"), [(nn.RNN, "scaled"), (drawn([nn.LSTM, nn.GRU], 1, "recurrent")[0], "components")]
)
def test_one_function_of_forward_backward_and_step(layer, kind, seed):
    model = KINDS[kind](Recurrent(layer))
    # Of two sizes, so that what was compiled for one meets another.
    batches = [(torch.randn(rows, 2, 3), torch.randn(rows, 2, 2)) for rows in (4, 4, 5)]
    clear_compilation_metrics()
    found = [_trained(copy.deepcopy(model), compiled, batches) for compiled in (False, True)]
    # Between the graphs torch enters rules and derivatives, which are nobody's to capture.
    assert not [one.co_name for one in get_compilation_metrics() if str(one.co_filename).startswith(_LIBRARY)]
    # A weight that moves towards zero keeps the roundings of where it began.
    starts = [torch.zeros(()) for _ in batches] + [_value(p) for p in model.parameters()]
    for expected, one, start in zip(*found, starts, strict=True):
        size = max(expected.abs().max(), start.abs().max())
        assert torch.allclose(one, expected, rtol=4e-3 if kind == "scaled" else 1e-6, atol=float(1e-3 * size))


@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_may_use_any_of_the_outputs(kind, seed):
    class Several(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(4, 3), nn.Linear(3, 2)

        def forward(self, x):
            hidden = self.first(x)
            return hidden * 2, self.last(hidden.tanh()), hidden.square().mean()

    model, x = KINDS[kind](Several()), torch.randn(5, 4)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for used in (s for n in (1, 2, 3) for s in itertools.combinations(range(3), n)):
        found = []
        for run in (model, compiled):
            model.zero_grad()
            out = run(x)
            sum(out[i].sum() for i in used).backward()
            found.append([p.grad for p in model.parameters()])
        for expected, one in zip(*found, strict=True):
            # No gradient, or one of zeros: what no output that is used reads.
            wanted = torch.zeros(one.shape, dtype=torch.float64) if expected is None else _value(expected)
            assert (_value(one) - wanted).norm() <= 4e-3 * wanted.norm()


def test_a_plain_gradient_of_a_compiled_scaled_output_is_what_it_is_in_eager(seed):
    model, x = scalify(nn.Linear(4, 3), torch.float16), torch.randn(5, 4)
    gradient = torch.randn(5, 3) * 2.0**-30
    found = []
    for run in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        model.zero_grad()
        run(x).backward(gradient)
        found.append([_value(p.grad) for p in model.parameters()])
    for expected, one in zip(*found, strict=True):
        assert (one - expected).norm() <= 2e-3 * expected.norm()


@pytest.mark.parametrize(
    "optimizer", drawn([torch.optim.AdamW, torch.optim.RMSprop, torch.optim.NAdam], 2, "compiled steps")
)
def test_a_compiled_step_of_torchs_optimizers(optimizer, seed):
    """Zeros, and gradients whose squares a float16 payload has no number for, beside ordinary ones."""
    rows = torch.tensor([1.0, 1e-3, 1e-6, 0.0])[:, None]
    gradients = [torch.randn(4, 3) * rows for _ in range(2)]
    start, found = torch.randn(4, 3), []
    for compiled in (False, True):
        p = nn.Parameter(ScaledTensor.encode(start, torch.float16))
        made = optimizer([p], lr=0.01)
        step = torch.compile(made.step, backend="aot_eager") if compiled else made.step
        with strict():
            for gradient in gradients:
                p.grad = ScaledTensor.encode(gradient, torch.float16)
                step()
        found.append(_value(p))
    assert torch.allclose(found[1], found[0], rtol=2e-3, atol=2e-3)
