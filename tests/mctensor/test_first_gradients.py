"""Plain gradients: what is saved for a backward pass is compared and subtracted with all its components."""

import math

import pytest
import torch
import torch.nn.functional as F

from halfulp.mctensor import MCTensor
from halfulp.subclass._in_backward import disable_result_rounding

KINDS = [(torch.bfloat16, 2), (torch.float16, 2), (torch.float32, 2), (torch.float64, 2), (torch.float32, 3)]
ROWS = torch.tensor([0, 0])
PLACES = torch.tensor([[0, 1, 0], [1, 0, 1]])

FUNCTIONS = {
    "amax": lambda x: x.amax(1),
    "amin": lambda x: x.amin(),
    "norm inf": lambda x: torch.linalg.vector_norm(x, math.inf),
    "dist inf": lambda x: torch.dist(x, x.detach() * 2, math.inf),
    "normalize inf": lambda x: F.normalize(x, p=math.inf, dim=1) * x.detach(),
    "norm -inf": lambda x: torch.linalg.vector_norm(x, -math.inf, 1),
    "cdist inf": lambda x: torch.cdist(x, x.detach() * 2, p=math.inf),
    "renorm inf": lambda x: x.renorm(math.inf, 0, 1.0) * x.detach(),
    "masked amax": lambda x: torch.masked.amax(x, 1, mask=x.detach() > 0),
    "masked norm": lambda x: torch.masked.norm(x, math.inf, 1, mask=torch.ones(2, 3, dtype=torch.bool)),
    "logsumexp": lambda x: torch.logsumexp(x + 587, 1),
    "masked logsumexp": lambda x: torch.masked.logsumexp(x + 587, 1),
    "std": lambda x: (x + 587).std(1),
    "prod": lambda x: x.prod(1),
    "softmax": lambda x: (x + 587).softmax(1) * x.detach(),
}


@pytest.mark.sampled(1)
@pytest.mark.filterwarnings("ignore:scatter_reduce:UserWarning", "ignore:index_reduce:UserWarning")
@pytest.mark.filterwarnings("ignore:.*no rule for:halfulp.subclass.FallbackWarning")
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_they_are_those_of_all_components_rounded(name, kind, seed):
    dtype, components = kind
    values = torch.randperm(6).double().reshape(2, 3) / 7 + 0.1 + torch.rand(1).double() / 9
    found = []
    for gradients in ("first", "components"):
        x = MCTensor.encode(values, components, dtype, gradients=gradients).requires_grad_()
        try:
            FUNCTIONS[name](x).sum().backward()
        except NotImplementedError as refusal:
            pytest.skip(str(refusal))
        found.append(x.grad)
    assert type(found[0]) is torch.Tensor
    assert bool(found[0].isfinite().all())
    error = (found[0].double() - found[1].decode()).abs().max()
    assert error <= 3 * torch.finfo(dtype).eps * found[1].decode().abs().max()


@pytest.mark.filterwarnings("ignore:scatter_reduce:UserWarning", "ignore:index_reduce:UserWarning")
@pytest.mark.filterwarnings("ignore:.*no rule for:halfulp.subclass.FallbackWarning")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_components_that_lie_far_apart_change_no_gradient(name, dtype, seed):
    # No two of them are as far apart as two others, of which the largest distance would have to choose one.
    values = (torch.randperm(6).double().reshape(2, 3) ** 1.4 / 13 + 0.1).to(dtype)
    far = (torch.randn(2, 3, dtype=torch.float64) * 2.0**-60).to(dtype)
    plain = values.double().requires_grad_()
    FUNCTIONS[name](plain).sum().backward()
    for gradients in ("first", "components"):
        x = MCTensor.encode(values, 2, dtype, gradients=gradients) + MCTensor.encode(far, 2, dtype)
        x = x.detach().requires_grad_()
        FUNCTIONS[name](x).sum().backward()
        found = (x.grad.decode() if isinstance(x.grad, MCTensor) else x.grad).double()
        bound = (20 * torch.finfo(dtype).eps + 1e-12) * plain.grad.abs().max()  # x + 587 costs plain float64 digits
        torch.testing.assert_close(found, plain.grad, rtol=0, atol=float(bound))


def test_between_the_steps_of_one_operator_of_a_backward_pass_nothing_is_rounded():
    x, found = MCTensor.encode([1 / 3], 3, torch.float32).requires_grad_(), []

    def multiply(gradient):
        found.append(x.detach() * gradient)
        with disable_result_rounding():
            found.append(x.detach() * gradient)
        found.append(x.detach() * gradient)

    y = 2 * x
    y.register_hook(multiply)
    y.sum().backward()
    assert [type(one) for one in found] == [torch.Tensor, MCTensor, torch.Tensor]
