"""Random operators on either tensor draw what torch draws for a plain tensor of the same strides and seed."""

import pytest
import torch
import torch.nn.functional as F

from halfulp.mctensor import MCTensor
from halfulp.scaled import ScaledTensor

LAYOUTS = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.transpose(1, 2),
    "permuted": lambda x: x.permute(2, 0, 1),
    "channels last": lambda x: x[:, :, :, None].contiguous(memory_format=torch.channels_last),
    "sliced": lambda x: x[:, ::2],
    "expanded": lambda x: x[:1].expand(4, 6, 5),
    "empty": lambda x: x[:0].transpose(1, 2),
    "0-d": lambda x: x[0, 0, 0],
}
IN_PLACE = {
    "bernoulli_": (0.3,),
    "exponential_": (),
    "log_normal_": (),
    "cauchy_": (),
    "geometric_": (0.3,),
    "random_": (5,),
}
# A multi-component tensor draws more digits of these than float32 has.
DIGITS = {"uniform_": (), "normal_": ()}


def _masks():
    for name in ("dropout", "alpha_dropout", "feature_alpha_dropout"):
        yield name, lambda x, name=name: getattr(F, name)(x, 0.3, True)


def _drawn(arguments):
    for name, given in arguments.items():
        # The copy has the strides of an expanded tensor no more: its elements are memory of their own.
        yield name, lambda x, name=name, given=given: getattr(torch.empty_like(x), name)(*given)


BOTH = dict([*_masks(), *_drawn(IN_PLACE)])
SCALED = BOTH | dict(_drawn(DIGITS)) | {"rand_like": torch.rand_like, "rrelu": lambda x: F.rrelu(x, training=True)}
KINDS = {
    "scaled": (lambda x: ScaledTensor.encode(x, torch.float32), SCALED),
    "two components": (lambda x: MCTensor.encode(x, 2, torch.float32), BOTH),
}


def _seeded(operator, x, seed):
    torch.manual_seed(seed)
    return operator(x)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, (_, names) in KINDS.items() for name in names])
def test_one_seed_draws_the_same_in_every_layout(kind, name, layout, seed, needs_torch):
    if name == "exponential_":
        needs_torch("exponential_ that draws the same numbers in every dtype")
    if layout == "0-d" and name == "feature_alpha_dropout":
        pytest.skip("torch refuses it for a single number")
    encode, operators = KINDS[kind]
    x = torch.randn(4, 6, 5)
    wanted = _seeded(operators[name], LAYOUTS[layout](x), seed)
    got = _seeded(operators[name], LAYOUTS[layout](encode(x)), seed).decode(torch.float32)
    # Digits beyond float32 may round the other way, also before a difference; another draw is off by far more.
    torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-5)
