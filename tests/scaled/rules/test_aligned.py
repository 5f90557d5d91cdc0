"""Sums, choices, joins, bounds and pads: bits do not depend on scales; constants decide none."""

import copy

import pytest
import torch
import torch.nn.functional as F

from halfulp.kernels import same_bits
from halfulp.scaled import ScaledTensor
from halfulp.subclass import strict
from halfulp.testing import check_rule

aten = torch.ops.aten
MASK = torch.tensor([[True, False, True], [False, False, True]])


def pair():
    return torch.randn(2, 3), torch.randn(2, 3)


def one():
    return (torch.randn(2, 3),)


def volume():
    return (torch.randn(2, 2, 4, 4, 4),)


EXACT = {
    "add": (lambda a, b: a + b, pair),
    "add alpha": (lambda a, b: torch.add(a, b, alpha=-0.7), pair),
    "sub": (lambda a, b: torch.sub(a, b, alpha=3), pair),
    "rsub": (lambda a, b: torch.rsub(a, b, alpha=0.3), pair),
    "number minus": (lambda a: 2.5 - a, one),
    "broadcast": (lambda a, b: a + b[0], pair),
    "maximum": (torch.maximum, pair),
    "minimum": (torch.minimum, pair),
    "fmax": (torch.fmax, pair),
    "fmin": (torch.fmin, pair),
    "where": (lambda a, b: torch.where(MASK, a, b), pair),
    "where number": (lambda a: torch.where(MASK, a, 0.3), one),
    "where infinity": (lambda a: torch.where(MASK, -float("inf"), a), one),
    "cat": (lambda a, b: torch.cat([a, b, a[:0]]), pair),
    "stack": (lambda a, b: torch.stack([a, b], 1), pair),
    "clamp": (lambda a: torch.clamp(a, -0.5, 0.7), one),
    "clamp_min": (lambda a: a.clamp_min(0.1), one),
    "clamp by tensors": (lambda a, b: torch.clamp(a, b - 0.1, b + 0.1), pair),
    "clamp_max tensor": (lambda a, b: a.clamp_max(b), pair),
    "masked_fill": (lambda a: a.masked_fill(MASK, 3.0), one),
    "masked_fill infinity": (lambda a: a.masked_fill(MASK, -float("inf")), one),
    "masked_scatter": (lambda a, b: a.masked_scatter(MASK, b), pair),
    "masked_select": (lambda a: a.masked_select(MASK), one),
    "fill": (lambda a: aten.fill(a, 3.0), one),
    "fmod": (torch.fmod, pair),
    "remainder": (torch.remainder, pair),
    "fmod number": (lambda a: torch.fmod(a, 0.3), one),
    "remainder number": (lambda a: a % 0.3, one),
    "copysign": (torch.copysign, pair),
    "pad": (lambda a: F.pad(a, (1, 2), value=0.3), one),
    "pad zeros": (lambda a: F.pad(a, (1, -1, 2, 0)), one),
    "slice": (lambda a: a[:, 1:], one),
    "slice_scatter": (lambda a, b: a.slice_scatter(b[:1], 0, 0, 1), pair),
    "select_scatter": (lambda a, b: a.select_scatter(b[0], 0, 1), pair),
    "diagonal": (lambda a: a.diagonal(), one),
    "diagonal_scatter": (lambda a, b: a.diagonal_scatter(b[0, :2]), pair),
    "as_strided_scatter": (lambda a, b: a.as_strided_scatter(b[0, :2], (2,), (2,)), pair),
    "unfold": (lambda a: a.unfold(1, 2, 1), one),
    "nan_to_num": (lambda a: torch.nan_to_num(a / 0, 0.5, 2.0, -3.0), one),
}
EXACT |= {
    f"{mode} {n}d": (
        lambda a, mode=mode, n=n: F.pad(a[(0,) * (3 - n)], (1, 2) * n, mode=mode),
        volume,
    )
    for mode in ("reflect", "replicate", "circular")
    for n in (1, 2, 3)
}


@pytest.mark.parametrize("case", EXACT)
def test_bits_are_those_of_plain_tensors_under_all_scales(case, seed):
    with strict():
        check_rule(*EXACT[case], seed=seed, trials=2)


@pytest.mark.parametrize("function", [torch.heaviside, lambda a, b: aten.copy(a, b[0])])
def test_bits_without_gradients(function, seed):
    with strict():
        check_rule(function, pair, seed=seed, trials=2, gradients=False)


def test_hypot_is_close(seed):
    with strict():
        check_rule(torch.hypot, pair, seed=seed, exact=1e-6)


def test_narrow_payloads(differences, seed):
    for function in (torch.add, torch.maximum, lambda a, b: torch.cat([a, b]), lambda a, b: torch.where(MASK, a, b)):
        assert max(differences(function, [(2, 3), (2, 3)])) < 1e-2


def small():
    return ScaledTensor.encode(torch.tensor([1e-5, -2e-5, 3e-5]), torch.float16)


@pytest.mark.parametrize(
    "write",
    [
        lambda x, c: x.masked_fill(torch.tensor([True, False, False]), c),
        lambda x, c: torch.where(torch.tensor([True, False, False]), c, x),
        lambda x, c: torch.where(torch.tensor([True, False, False]), torch.tensor(c), x),
        lambda x, c: x.index_fill(0, torch.tensor([0]), c),
        lambda x, c: x.scatter(0, torch.tensor([0]), c),
        lambda x, c: x.index_put((torch.tensor([0]),), torch.tensor(c)),
        lambda x, c: F.pad(x[1:], (1, 0), value=c),
        lambda x, c: torch.cat([x[:1].clamp(c, c), x[1:]]),
    ],
)
class TestConstants:
    def test_what_stands_for_infinity_saturates_and_leaves_the_rest(self, write):
        x = small()
        for constant in (-1e9, torch.finfo(torch.float32).min):
            y = write(x, constant)
            assert same_bits(y[1:].decode(), x[1:].decode())
            assert -256 < y[0].item() <= -128
            large = x * 2.0**20
            assert torch.equal(write(large, constant).scale, large.scale)
            assert write(large, constant)[0].item() == -65504 * large.scale.item()

    def test_others_keep_their_value(self, write):
        y = write(small(), 1000.0)
        assert abs(y[0].item() - 1000) < 1
        assert torch.allclose(y[1:].decode(), small()[1:].decode(), rtol=1e-2)

    def test_infinities_stay(self, write):
        y = write(small(), -float("inf"))
        assert y[0].item() == -float("inf")
        assert torch.equal(y.scale, small().scale)

    def test_zeros_of_any_scale_take_theirs(self, write):
        y = write(torch.zeros_like(small()), 3e5)
        assert abs(y[0].item() / 3e5 - 1) < 1e-3
        assert y[1:].tolist() == [0.0, 0.0]

    def test_zeros_with_infinities_still_take_any_scale(self, write):
        y = write(torch.zeros_like(small()), -float("inf"))
        total = y + small()
        assert total[0].item() == -float("inf")
        assert same_bits(total[1:].decode(), small()[1:].decode())


@pytest.mark.parametrize("large", [-1e4 * 2e4, -1e9, torch.finfo(torch.float32).min, -float("inf")])
def test_a_mask_of_large_numbers_is_added_without_deciding_the_scale(large):
    scores = ScaledTensor.encode(torch.tensor([0.5, -1.5, 1.25]), torch.float16)
    masked = scores + torch.tensor([0.0, large, 0.0])
    assert masked[[0, 2]].tolist() == [0.5, 1.25]
    assert masked.softmax(0)[1].item() == 0.0


@pytest.mark.parametrize("storage", [torch.float32, torch.bfloat16])
def test_a_large_number_chosen_beside_tiny_ones_is_that_number(storage):
    x = ScaledTensor.encode(torch.tensor([1.0, -1.0]) * 2.0**-120, storage)
    number = float(torch.tensor(-1e9).to(storage))
    for y in (F.threshold(x, 0.0, number), torch.where(x <= 0, number, x), torch.cat([x[:1], torch.tensor([number])])):
        assert y[1].item() == number


def test_zeros_never_decide(seed):
    x = small()
    zeros = torch.zeros_like(x)
    for y in (x + zeros, torch.cat([x, zeros])[:3], torch.where(x > 0, x, zeros), torch.maximum(x, zeros - 0)):
        assert y.scale.item() == x.scale.item()
    infinite = torch.full_like(x, -float("inf"))
    assert torch.where(x > 0, x, infinite).scale.item() == x.scale.item()
    large = ScaledTensor.encode(torch.full((3,), 1e9), torch.float16)
    assert (large + infinite).tolist() == [-float("inf")] * 3


def test_a_thousand_decaying_steps_of_a_moving_average_stay_with_float32():
    g = ScaledTensor.encode(torch.tensor([1.0, -2.0, 0.5]), torch.float16)
    average, expected = torch.zeros_like(g), torch.zeros(3)
    for step in range(1000):
        factor = 0.97**step
        average = average * 0.95 + g * (0.05 * factor)
        expected = expected * 0.95 + g.decode() * (0.05 * factor)
    assert average.isfinite().all()
    # The scale stays where it began, and the payload decays to its smallest number.
    assert torch.allclose(average.decode(), expected, rtol=1e-2, atol=2.0**-24)


def test_sums_that_outgrow_their_scale_take_a_larger_one():
    x = ScaledTensor.encode(torch.tensor([1.0, -0.5]), torch.float16)
    y = x
    for _ in range(40):
        y = y + y
    assert y.tolist() == [2.0**40, -(2.0**39)]
    base, left, right = (ScaledTensor(torch.full((2, 2), 3e4, dtype=torch.float16), 1.0) for _ in range(3))
    assert torch.allclose(torch.addmm(base, left, right).decode(), torch.full((2, 2), 1.8e9), rtol=1e-2)
    assert torch.allclose((base - base * -3).decode(), torch.full((2, 2), 1.2e5), rtol=1e-2)
    logits = ScaledTensor.encode(torch.tensor([2e5, 0.0, -1e5]), torch.float16)
    assert torch.allclose(logits.log_softmax(0).decode(), torch.tensor([0.0, -2e5, -3e5]), rtol=1e-2)


def test_a_small_number_added_keeps_what_it_is_added_to_from_zero(seed):
    storage = torch.float16
    values = torch.tensor([0.0, -0.0, 1.0, -1.0]) * torch.rand(4)
    x = ScaledTensor.encode(values, storage)
    total = (x + 1e-30).decode()
    assert (total[:2] > 0).all()
    assert torch.equal(total[2:], x.decode()[2:])
    assert torch.equal((x + 0.0).decode().abs()[:2], torch.zeros(2))
    assert (torch.zeros(3) / (ScaledTensor.encode(torch.zeros(3), storage) + 1e-30)).decode().eq(0).all()


def test_a_second_moment_is_zero_only_where_its_root_is(seed):
    root = ScaledTensor.encode(torch.cat([torch.randn(8), torch.randn(8) * 2.0**-20, torch.zeros(2)]))
    moment = torch.addcmul(torch.zeros_like(root), root, root, value=1e-3)
    assert torch.equal(moment.decode() > 0, root.decode() != 0)


@pytest.mark.parametrize("number", [2e7, -2e7, 1e9, -1e30])
def test_one_large_scaled_number_is_data(number):
    large, tiny = (ScaledTensor.encode(torch.tensor(x)) for x in (number, 1.0))
    for joined in (torch.stack([large, tiny]), torch.cat([large.view(1), tiny.view(1)])):
        assert joined[0].item() == pytest.approx(number, rel=1e-3)
        assert joined[1].item() == (1.0 if abs(number) < 1e9 else pytest.approx(0.0, abs=64.0))
    choose = torch.maximum if number > 0 else torch.minimum
    assert choose(large, tiny).item() == pytest.approx(number, rel=1e-3)
    assert torch.where(torch.tensor(True), large, tiny).item() == pytest.approx(number, rel=1e-3)


def test_equal_large_scaled_numbers_are_a_mask_if_negative():
    few = ScaledTensor.encode(torch.tensor([0.5, 0.75]))
    for number in (1e9, 1e30):
        filled = ScaledTensor.encode(torch.full((2,), number))
        assert torch.maximum(filled, few).tolist() == pytest.approx([number] * 2, rel=1e-3)
        masked = torch.where(torch.tensor([True, False]), few, -filled)
        assert masked[0].item() == 0.5
        assert masked[1].item() <= -128


@pytest.mark.parametrize("number", [-1e9, 1e9, -1e30, torch.finfo(torch.float32).min, torch.finfo(torch.float32).max])
def test_one_number_that_full_like_made_is_a_mask_until_it_is_written(number):
    few = ScaledTensor.encode(torch.tensor([[0.5, 0.75]]))
    for made in (few.new_full((), number), few.new_full((1, 1), number), torch.full_like(few[:, :1], number)):
        assert torch.where(torch.tensor([True, False]), few, made)[0, 0].item() == 0.5
        if made.dim():
            assert torch.cat([few, made], 1)[0, :2].tolist() == [0.5, 0.75]
        moves = (torch.clone, torch.detach, lambda x: x[...], lambda x: x.view(-1), lambda x: x.expand(1, 2).detach())
        for move in (*moves, copy.deepcopy, lambda x: x.to("cpu", copy=True)):
            assert torch.where(torch.tensor([True, False]), few, move(made))[0, 0].item() == 0.5
        part = made.view(-1)
        part.copy_(torch.tensor(-2e7))
        for one in (made, part.view(()), made.clone()):
            assert torch.where(torch.tensor([True, False]), few, one)[0, 1].item() == pytest.approx(-2e7, rel=1e-3)


HUGE_PAIRS = {
    "tiny": ([1e30, -3e30], [1e-25, 1e-25]),
    "beside zeros": ([1e30, -3e30, 0.0], [1e-25, 1e-25, 1.0]),
    "of two numbers": ([-1e30, -3e30], [1.0, 1.0]),
    "negative": ([-3e38, -3e38], [1.0, 1.0]),
}


@pytest.mark.parametrize("storage", [torch.float16, torch.float32, torch.float8_e5m2])
@pytest.mark.parametrize("name", HUGE_PAIRS)
def test_a_huge_scale_of_data_decides(name, storage):
    values, others = map(torch.tensor, HUGE_PAIRS[name])
    x, y = ScaledTensor.encode(values, storage), ScaledTensor.encode(others, storage)
    found = [x + y, x - y, x - 1e-8]
    if name != "negative":  # equal numbers are a mask where one is chosen
        found += [torch.cat([x, y])[: len(values)], torch.where(torch.ones(len(values), dtype=torch.bool), x, y)]
    for total in found:  # a sum of positive numbers is kept from zero
        assert torch.allclose(total.decode(), values, rtol=0.2 if storage == torch.float8_e5m2 else 1e-3, atol=1e26)


@pytest.mark.parametrize("number", [-1e30, -3e38, torch.finfo(torch.float32).min])
@pytest.mark.parametrize(
    "storage", [torch.float16, torch.bfloat16, torch.float32, torch.float8_e5m2, torch.float8_e4m3fn]
)
def test_an_encoded_mask_saturates_beside_scores_of_any_size(number, storage):
    mask = torch.tensor([0.0, 0.0, number, number])
    for size in (1.0, 1e-3, 1e-6, 1e-30):
        scores = torch.tensor([1.0, 2.0, 3.0, 4.0]) * size
        x, m = ScaledTensor.encode(scores, storage), ScaledTensor.encode(mask, storage)
        wanted = (scores + mask).softmax(0)
        for masked in (x + m, torch.where(mask == 0, x, m), x.clone().add_(m)):
            assert (masked.decode()[2:] <= -128).all()
            assert torch.allclose(masked.softmax(0).decode(), wanted, atol=2e-2)
    assert (torch.zeros_like(x) + m).tolist() == m.tolist()


@pytest.mark.parametrize(
    ("storage", "least"),
    [
        *((torch.float16, 2.0**-24), (torch.float8_e5m2, 2.0**-16), (torch.float8_e4m3fn, 0.0)),
        *((torch.bfloat16, 2.0**-30), (torch.float32, 2.0**-30)),
    ],
    ids=str,
)
def test_a_sum_of_one_sign_is_no_0_where_the_smallest_number_is_as_good_as_0(storage, least):
    """Beside 64: in e4m3, whose smallest number is not, and of two signs, it may be one."""
    large = ScaledTensor(torch.tensor([64.0, 0.0, -0.0, 0.0, 2.0**-9]).to(storage), 1.0)
    small = ScaledTensor(torch.tensor([0.0, 1.0, -1.0, 0.0, 1.0]).to(storage), 2.0**-30)
    for found in (large + small, small + large, large.clone().add_(small), torch.add(large, small, alpha=1)):
        assert found.scale.item() == 1.0
        payload = found.payload.double()
        assert payload[:4].tolist() == [64.0, least, -least, 0.0]
        assert payload[4].item() == large.payload.double()[4].item() + (2.0**-30 if storage == torch.float32 else 0)
    wide = storage in (torch.bfloat16, torch.float32)
    assert (large - small).payload.double()[:3].tolist() == [64.0, -least if wide else 0.0, least if wide else 0.0]
