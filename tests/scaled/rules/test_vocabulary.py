"""Every word of the vocabulary makes a rule of a user's operator, which passes the library's own check."""

import pytest
import torch

import halfulp as hu
from halfulp.scaled import rules

WORDS = {
    "reversed": (rules.data_movement, {}, lambda x: x.flip(0)),
    "leaky": (rules.homogeneous, {}, lambda x: torch.where(x > 0, x, x / 4)),
    "cubed": (rules.homogeneous, {"degree": 3}, lambda x: x**3),
    "sigmoid": (rules.unit_scale, {}, torch.sigmoid),
    "lgamma": (rules.measured_scale, {}, torch.lgamma),
    "swish": (rules.gate, {}, lambda x: x * torch.sigmoid(x)),
    "positive": (rules.decoded, {"family": "comparison"}, lambda x: x > 0),
}
TWO = {
    "swiglu": (rules.homogeneous, {"y": 1}, lambda x, y: torch.nn.functional.silu(x) * y),
    "larger": (rules.aligned, {}, torch.maximum),
    "gated": (rules.gate, {"of": "y"}, lambda x, y: torch.sigmoid(x) * y),
}


def operator(name: str, schema: str, compute) -> torch._ops.OpOverloadPacket:
    torch.library.define(f"halfulp_vocabulary::{name}", schema)
    torch.library.impl(f"halfulp_vocabulary::{name}", "CPU")(compute)
    return getattr(torch.ops.halfulp_vocabulary, name)


@pytest.mark.parametrize("name", [*WORDS, *TWO])
def test_a_word_is_a_rule(name, seed):
    count = 1 if name in WORDS else 2
    word, options, compute = (WORDS | TWO)[name]
    schema = f"({', '.join(['Tensor x', 'Tensor y'][:count])}) -> Tensor"
    packet = operator(name, schema, compute)
    word(packet.default, **options)
    hu.testing.check_rule(packet, lambda: tuple(torch.randn(7) for _ in range(count)), gradients=False)


def test_an_argument_that_an_operator_lacks_is_refused():
    packet = operator("lacking", "(Tensor x, Tensor weight) -> Tensor", lambda x, weight: x * weight)
    with pytest.raises(ValueError, match=r"unknown argument of .*'wieght'; did you mean 'weight'"):
        rules.homogeneous(packet.default, wieght=1)
    with pytest.raises(ValueError, match="Allowed: x, weight"):
        rules.gate(packet.default, of="y")
