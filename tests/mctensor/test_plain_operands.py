"""Plain operands beside MCTensors: operators of several steps keep all digits, as where all operands are MCTensors."""

import pytest
import torch
import torch.nn.functional as F

from halfulp.mctensor import MCTensor
from halfulp.mctensor._before_autograd import ENCODED_COMPOSITE_OPERATORS
from halfulp.subclass import strict

N, FOUR = (torch.float64, 2), (2, 3, 4)


def _layer(name):
    """A fused recurrent layer's last states; the input or the weights may be plain."""
    return lambda x, h, *w: getattr(torch, name)(x, h, w, True, 1, 0.0, False, False, True)[-1]


CASES = {
    "batch_norm": (
        lambda x, w, b, m, v: F.batch_norm(x, m.detach(), v.detach().clamp(min=0.5), w, b),
        (FOUR, (3,), (3,), (3,), (3,)),
    ),
    "batch_norm in training": (lambda x, w, b: F.batch_norm(x, None, None, w, b, True), (FOUR, (3,), (3,))),
    "instance_norm": (lambda x, w, b: F.instance_norm(x, None, None, w, b), (FOUR, (3,), (3,))),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (4,), w, b), (FOUR, (4,), (4,))),
    "group_norm": (lambda x, w, b: F.group_norm(x, 3, w, b), (FOUR, (3,), (3,))),
    "rms_norm": (lambda x, w: F.rms_norm(x, (4,), w), (FOUR, (4,))),
    "einsum": (lambda a, b, c: torch.einsum("ij,jk,kl->il", a, b, c), ((4, 4),) * 3),
    "multi_dot": (lambda a, b, c: torch.linalg.multi_dot([a, b, c]), ((4, 4),) * 3),
    "kl_div": (lambda x, t: F.kl_div(x, t.abs(), reduction="sum"), (FOUR, FOUR)),
    "poisson_nll_loss": (lambda x, t: F.poisson_nll_loss(x, t.clamp(min=0.5)), (FOUR, FOUR)),
    "cosine_similarity": (F.cosine_similarity, (FOUR, FOUR)),
    "triplet_margin_loss": (F.triplet_margin_loss, ((2, 4),) * 3),
    "pairwise_distance": (F.pairwise_distance, ((2, 4),) * 2),
    "trapezoid": (lambda y, x: torch.trapezoid(y, x), (FOUR, FOUR)),
    "LSTM's cell": (
        lambda x, h, c, u, w: torch.lstm_cell(x, (h, c), u, w)[1],
        ((2, 3), (2, 4), (2, 4), (16, 3), (16, 4)),
    ),
    "GRU's cell": (lambda x, h, u, w: torch.gru_cell(x, h, u, w), ((2, 3), (2, 4), (12, 3), (12, 4))),
    "GRU": (_layer("gru"), ((2, 5, 3), (1, 2, 4), (12, 3), (12, 4), (12,), (12,))),
    "tanh layer": (_layer("rnn_tanh"), ((2, 5, 3), (1, 2, 4), (4, 3), (4, 4), (4,), (4,))),
}


def _encoded(x, components=2):
    return MCTensor.encode(x.detach(), components, torch.float64, gradients="components")


def _gap(found, wanted):
    """A hinge may be shut: then both are zero."""
    return ((found - wanted).abs().amax() / wanted.abs().amax().clamp(min=2.0**-500)).item()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", CASES)
def test_each_operand_may_be_plain(name, seed):
    """One MCTensor among plain operands, each by turns: result and gradients beside those of four float64."""
    function, shapes = CASES[name]
    values = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    leaves = [_encoded(x, 4).requires_grad_() for x in values]
    wanted = function(*leaves)
    wanted.square().sum().backward()
    for at in range(len(values)):
        operands = [x.clone().requires_grad_() for x in values]
        operands[at] = _encoded(values[at]).requires_grad_()
        with strict():
            found = function(*operands)
            found.square().sum().backward()
        assert isinstance(found, MCTensor)
        assert _gap(found.detach(), wanted.detach()) <= 2.0**-92
        for x, leaf in zip(operands, leaves):
            assert (x.grad is None) == (leaf.grad is None)
            if leaf.grad is not None:
                assert type(x.grad) is type(x.detach())
                assert _gap(MCTensor.encode(x.grad), leaf.grad) <= (2.0**-84 if isinstance(x, MCTensor) else 2.0**-48)


def test_composite_operators_are_torchs_own():
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    assert all(operator.has_kernel_for_dispatch_key(key) for operator in ENCODED_COMPOSITE_OPERATORS)


def test_a_compiled_composite_operator_keeps_the_digits(seed):
    a, b, c = (torch.randn(4, 4, dtype=torch.float64) for _ in range(3))

    def chain(a, b, c):
        return torch.einsum("ij,jk,kl->il", a, b, c)

    found = torch.compile(chain, backend="aot_eager", fullgraph=True)(a, b, _encoded(c))
    assert _gap(found, chain(_encoded(a, 4), _encoded(b, 4), _encoded(c, 4))) <= 2.0**-92
