"""Every word of the vocabulary makes a rule of a user's operator, which passes the library's own check."""

import pytest
import torch

import halfulp as hu
from halfulp.scaled import ScaledTensor, rules

WORDS = {
    "reversed": (rules.data_movement, {}, lambda x: x.flip(0)),
    "leaky": (rules.homogeneous, {}, lambda x: torch.where(x > 0, x, x / 4)),
    "cubed": (rules.homogeneous, {"degree": 3}, lambda x: x**3),
    "sigmoid": (rules.unit_scale, {}, torch.sigmoid),
    "lgamma": (rules.measured_scale, {}, torch.lgamma),
    "swish": (rules.gated_activation, {}, lambda x: x * torch.sigmoid(x)),
    "positive": (rules.decoded, {"family": "comparison"}, lambda x: x > 0),
}
TWO = {
    "swiglu": (rules.homogeneous, {"y": 1}, lambda x, y: torch.nn.functional.silu(x) * y),
    "larger": (rules.aligned, {}, torch.maximum),
    "gated": (rules.gated_activation, {}, lambda x, y: x * torch.sigmoid(y)),
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


MASK = torch.tensor([[False, True, False, True], [False, False, True, True], [False, True, True, False]])
PLACES = {
    "masked_fill": lambda x, v: x.masked_fill(MASK, v),
    "where": lambda x, v: torch.where(MASK, torch.tensor(v), x),
    "where_full_like": lambda x, v: torch.where(MASK, torch.full_like(x, v), x),
    "where_full": lambda x, v: torch.where(MASK, torch.full((3, 4), v), x),
    "added": lambda x, v: x + torch.zeros_like(x).masked_fill(MASK, v),
    "added_plain": lambda x, v: x + torch.zeros(3, 4).masked_fill(MASK, v),
    "written": lambda x, v: torch.index_put(x, (MASK,), torch.tensor(v)),
    "joined": lambda x, v: torch.cat([x, torch.full((3, 2), v)], 1),
    "joined_full_like": lambda x, v: torch.cat([x, x.new_full((3, 2), v)], 1),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("constant", [-1e4, -65504.0, -1e9, -1e38, torch.finfo(torch.float32).min, -float("inf")])
@pytest.mark.parametrize("place", PLACES)
def test_masked_softmax(place, constant, seed):
    for size in (1.0, 1e-2, 1e-5):
        for dtype, near in ((torch.float16, 2e-3), (torch.float8_e5m2, 0.2), (torch.float32, 1e-6)):
            if dtype == torch.float8_e5m2 and place == "added_plain" and constant == -65504.0:
                continue  # a plain mask takes its own measured scale, under which five binades are left for scores
            scores = torch.randn(3, 4) * size
            x = ScaledTensor.encode(scores, dtype)
            wanted = PLACES[place](x.decode(), constant).softmax(-1)
            found = PLACES[place](x, constant).softmax(-1).decode()
            assert (found - wanted).abs().max() < near


def test_scores_that_are_zero_under_the_smallest_scales():
    for scale in (2.0**-126, 2.0**-123, 2.0**-60):
        for dtype in (torch.float16, torch.float32):
            x = ScaledTensor(torch.zeros(3, 4, dtype=dtype), scale)
            for y in (x, x * 0, x * 8.0):
                assert (y.masked_fill(MASK, -1e9).softmax(-1).decode()[MASK] == 0).all()


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float32]
)
def test_the_largest_number_of_float32_stays_finite(dtype):
    x = ScaledTensor.encode(torch.ones(3), dtype)
    largest = torch.finfo(torch.float32).max
    for y in (
        torch.full_like(x, -largest),
        x.new_full((3,), -largest),
        -ScaledTensor.encode(torch.full((3,), largest), dtype),
    ):
        assert y.decode().isfinite().all()
        assert (y.decode() < -0.8 * largest).all()
        assert torch.allclose(y.softmax(0).decode(), torch.full((3,), 1 / 3), rtol=0.1)
