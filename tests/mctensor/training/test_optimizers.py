"""Every optimizer of torch.optim on MCTensors, one tensor at a time and all at once, beside itself on float64."""

import inspect

import pytest
import torch

from halfulp.mctensor import MCTensor
from halfulp.subclass import strict

FORMATS = {
    (torch.float64, "components"): 1e-12,
    (torch.float32, "first"): 1e-5,
    (torch.bfloat16, "components"): 0.02,
    (torch.float16, "first"): 0.003,
}
# SparseAdam takes sparse gradients only, which have no components.
OPTIMIZERS = [
    name
    for name, kind in vars(torch.optim).items()
    if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer) and name not in ("Optimizer", "SparseAdam")
]
WAYS = [
    (name, foreach)
    for name in OPTIMIZERS
    for foreach in ((False, True) if "foreach" in inspect.signature(getattr(torch.optim, name)).parameters else (None,))
]


def _trained(name: str, foreach: bool | None, encode) -> list[torch.Tensor]:
    """Eight steps, of which RAdam's first five have no rectification."""
    aims = [torch.linspace(-2, 3, 12, dtype=torch.float64).reshape(4, 3), torch.full((2, 2), 0.3, dtype=torch.float64)]
    weights = [torch.tensor([[1.0], [0.5], [0.25], [2.0]]), torch.ones(1)]
    parameters = [encode(torch.cos(7 * aim)).requires_grad_() for aim in aims]
    options = {"max_iter": 4} if name == "LBFGS" else {} if foreach is None else {"foreach": foreach}
    optimizer = getattr(torch.optim, name)(parameters, lr=0.01, **options)

    def closure():
        optimizer.zero_grad()
        loss = sum((w * (p - aim) ** 2).sum() for p, aim, w in zip(parameters, aims, weights))
        loss.backward()
        return loss

    with strict():
        for _ in range(8):
            optimizer.step(closure)
    return [p.detach().decode() if isinstance(p, MCTensor) else p.detach() for p in parameters]


@pytest.mark.sampled(1)
@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True:UserWarning")  # LBFGS of torch 2.8
@pytest.mark.parametrize("kind", FORMATS, ids=str)
@pytest.mark.parametrize(("name", "foreach"), WAYS)
def test_an_optimizer_ends_where_float64_does(name, foreach, kind):
    dtype, gradients = kind
    if name == "LBFGS" and dtype.itemsize == 2:
        pytest.skip("its curvature needs more digits and range than one 16-bit component of the gradient has")
    found = _trained(name, foreach, lambda x: MCTensor.encode(x, 2, dtype, gradients=gradients))
    wanted = _trained(name, foreach, torch.clone)
    # Muon orthogonalizes in bfloat16 whatever it is given.
    bound = 0.02 if name == "Muon" else FORMATS[kind]
    assert max(float((a - b).abs().max()) for a, b in zip(found, wanted)) < bound


@pytest.mark.parametrize(("search", "steps", "bound"), [(None, 40, 1e-28), ("strong_wolfe", 12, 1e-4)])
def test_lbfgs_reaches_the_last_component(search, steps, bound, seed):
    """A line search compares losses as Python floats, so that it ends at a float64's digits; steps alone go on."""
    root = torch.randn(3, 3, dtype=torch.float64)
    matrix = MCTensor.encode(root @ root.t() + torch.eye(3, dtype=torch.float64), 2)
    aim = MCTensor.encode(torch.randn(3, dtype=torch.float64), 2) / 3
    x = MCTensor.encode(torch.zeros(3, dtype=torch.float64), 2, gradients="components").requires_grad_()
    optimizer = torch.optim.LBFGS([x], max_iter=steps, tolerance_grad=0, tolerance_change=0, line_search_fn=search)

    def closure():
        optimizer.zero_grad()
        off = x - aim
        loss = off @ (matrix @ off)
        loss.backward()
        return loss

    with strict():
        optimizer.step(closure)
    assert float((x - aim).detach().decode().abs().max()) < bound


@pytest.mark.parametrize(
    "kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.NAdam]
)
def test_a_gradient_far_below_the_largest_makes_no_larger_step_than_in_float32(kind):
    # The square of 2^-18 beside that of 4 is 2^-40 of it, which float16 components under one scale do not hold.
    gradient = torch.tensor([4.0, 2.0**-18, -(2.0**-24), 2.0**-30, 0.0])
    ours = torch.nn.Parameter(MCTensor.encode(torch.ones(5), 2, torch.float16))
    plain = torch.nn.Parameter(torch.ones(5))
    ours.grad, plain.grad = MCTensor.encode(gradient, 2, torch.float16), gradient.clone()
    optimizers = [kind([parameter], lr=1e-3) for parameter in (ours, plain)]
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.step()
    moved = (ours.detach().decode(torch.float64) - 1).abs()
    assert (moved <= 1.001 * (plain.detach().double() - 1).abs() + 1e-6).all(), moved
    assert moved[0] > 1e-3
