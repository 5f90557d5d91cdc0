"""Kahan's weight update: the paper's algorithm by torch's own bfloat16 operations, and the default by float32 sums."""

import pytest
import torch

import halfulp as hu
from halfulp.kernels import same_bits
from halfulp.optim._float32 import read_float32_weights
from halfulp.optim.parameters._outside_writes import record_payload_version

from ...laws.optim.cases import UPDATES, Adder, fit, stored_updates

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def _updates(steps, elements):
    """Updates over ten binades, so that some vanish, some change a last place and some cancel the weight."""
    return [torch.randn(elements) * 2 ** torch.empty(elements).uniform_(-12, 1).round() for _ in range(steps)]


@pytest.mark.parametrize("store", DTYPES)
def test_literal_is_the_papers_algorithm_in_sixteen_bit_operations(seed, store):
    start = torch.randn(4096).to(DTYPES[store])
    held = Adder("kahan-literal", start.float(), store)
    w, c = start.clone(), torch.zeros_like(start)
    for u in _updates(30, 4096):
        held.add(u)
        # Every line one rounding: torch computes a 16-bit operation in float32 and rounds its result.
        y = u.to(w.dtype) + c
        s = w + y
        c = (w - s) + y
        w = s
        assert same_bits(held.parameter.detach(), w)
        assert torch.equal(held.part("residual"), c)


@pytest.mark.parametrize("store", DTYPES)
def test_nearest_residual_is_kahan_in_float32_registers(seed, store):
    start = torch.randn(4096).to(DTYPES[store])
    held = Adder("kahan-nearest", start.float(), store)
    p, c = start.clone(), torch.zeros_like(start)
    for u in _updates(30, 4096):
        held.add(u)
        y = u + c.float()
        s = (p.float() + y).to(p.dtype)
        c = ((p.float() - s.float()) + y).to(p.dtype)
        p = s
        assert same_bits(held.parameter.detach(), p)
        assert torch.equal(held.part("residual"), c)


def test_a_stochastic_residual_is_a_neighbour_and_right_on_average(seed):
    p = torch.ones(200_000)
    u = torch.full_like(p, 2.0**-9 * (1 + 2**-9))
    held = Adder("kahan", p, seed=seed)
    held.add(u)
    assert torch.equal(held.parameter.detach(), torch.ones_like(p).bfloat16())
    kept = held.part("residual").double()
    below, ulp = 2.0**-9, 2.0**-16
    assert set(kept.unique().tolist()) == {below, below + ulp}
    share = float((kept > below).double().mean())
    expected = (float(u[0]) - below) / ulp
    assert abs(share - expected) < 6 * (expected * (1 - expected) / len(p)) ** 0.5


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"residual": "up"}, "nearest"),
        ({"weight": hu.Up()}, "nearest"),
        ({"literal": True, "weight": "stochastic"}, "leave"),
    ],
)
def test_roundings_that_make_no_sense_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        hu.Kahan(**given)


def test_rounding_objects_are_taken_by_name():
    assert hu.Kahan(weight=hu.Nearest(), residual=hu.Stochastic()) == hu.Kahan()
    assert hu.Kahan(literal=True).residual == "nearest"


STORES = ("bf16", "fp16", "e8m5", "e4m3fn", "e5m2")
CASES = [(update, store) for update, store in stored_updates("sgd") if store in STORES]
TINY = {"bf16": 2.0**-133, "fp16": 2.0**-24}


def _ulps(update) -> float:
    """How far a float32 value may lie from its parameter."""
    chosen = UPDATES[update]
    if getattr(chosen, "literal", False):
        return 1.5
    return 1.0 if getattr(chosen, "weight", None) == "stochastic" else 0.5


def _masked(p):
    p[::3] = 0.25


WRITES = {
    "zero_": lambda p: p.zero_(),
    "negative zero": lambda p: p.fill_(-0.0),
    "copy_": lambda p: p.copy_(fit(torch.randn(p.numel()), "bf16")),
    "clamp_": lambda p: p.clamp_(-0.5, 0.5),
    "mul_": lambda p: p.mul_(2.0**-7),
    "masked fill": _masked,
    "the smallest": lambda p: p.fill_(torch.finfo(p.dtype).smallest_normal),
    "powers of two": lambda p: p.copy_(torch.ldexp(torch.ones(p.numel()), torch.arange(p.numel()) % 20 - 12)),
    "shuffled": lambda p: p.copy_(p.flip(0).clone()),
    "infinite": lambda p: p[::2].fill_(torch.inf),
    "NaN": lambda p: p[::2].fill_(torch.nan),
}


def _ulp(shown: torch.Tensor, format) -> torch.Tensor:
    binade = torch.frexp(shown.double().nan_to_num(1.0, 1.0, 1.0))[1] - 1
    binade = torch.where(shown == 0, format.emin, binade.clamp(min=format.emin))
    return torch.ldexp(torch.ones(shown.shape, dtype=torch.float64), binade - format.mantissa_bits)


def _check(held: Adder, update: str, store: str) -> None:
    format = hu.formats.get({"bf16": torch.bfloat16, "fp16": torch.float16}.get(store, store))
    shown, weight = held.parameter.detach().float(), held.weight
    finite = shown.isfinite()
    assert weight[finite].isfinite().all()
    assert torch.equal(weight[shown.isnan()].isnan(), torch.ones(int(shown.isnan().sum()), dtype=torch.bool))
    if "split" not in UPDATES[update].name:  # see the test of what an infinity may mean
        assert torch.equal(weight[shown.isinf()], shown[shown.isinf()])
    far = (weight.double() - shown.double()).abs()[finite]
    # Each companion is rounded itself: its last place, which is at least the store's least number.
    room = _ulps(update) * (1 + 2.0**-format.mantissa_bits) * _ulp(shown, format)[finite]
    assert (far <= room + max(1, len(held.plan.weight_tensors) - 1) * format.smallest_subnormal).all()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_a_written_parameter_is_what_it_shows_to_half_an_ulp_and_moves(seed, case, write):
    update, store = case
    held = Adder(update, torch.randn(256), store)
    for _ in range(3):
        held.add(torch.randn(256) * 2.0**-6)
    values = held.parameter.data.clone()
    WRITES[write](values)
    held.parameter.data.copy_(fit(values.float(), store))
    _check(held, update, store)
    before = held.parameter.detach().clone().float()
    held.add(torch.full((256,), 0.25))
    after = held.parameter.detach().float()
    _check(held, update, store)
    wanted = before + 0.25
    ulp = _ulp(torch.maximum(before.abs(), wanted.abs()), _format(store)).float()
    finite = before.isfinite()
    assert ((after - wanted).abs() <= 3 * ulp)[finite].all()
    assert (after != before)[finite & (ulp < 0.125)].all()


def _format(store):
    return hu.formats.get({"bf16": torch.bfloat16, "fp16": torch.float16}.get(store, store))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("update", "store"), [case for case in CASES if case[1] in ("bf16", "fp16")])
def test_any_companion_beside_any_parameter_the_compiled_reader_agrees(seed, update, store):
    words = torch.randint(-(2**15), 2**15, (3, 4096)).to(torch.int16)
    words[0, :8] = torch.tensor([0, -(2**15), 0x7F80, -0x80, 0x7C00, 1, 0x7F7F, 0x7BFF])
    held = Adder(update, torch.zeros(4096), store)
    plan = held.plan
    plan.weight_tensors[0].copy_(words[0].view(plan.weight_tensors[0].dtype))
    for part in plan.weight_tensors[1:]:
        size = {1: 127, 2: 2**15}.get(part.element_size())
        part.copy_(torch.randint(-size, size, part.shape).to(part.dtype) if not part.dtype.is_floating_point else part)
    if plan.weight_tensors[1:] and plan.weight_tensors[1].dtype.is_floating_point:
        exponents = torch.randint(-14, 2, (4096,)).float()
        weight = plan.weight_tensors[0].float().abs().nan_to_num(0.0, 1.0)
        junk = weight * torch.exp2(exponents) * (torch.rand(4096) + 0.5)
        for part in plan.weight_tensors[1:]:
            part.copy_(junk * 2.0**-3)
            junk = junk * 2.0**-16
    record_payload_version(plan)  # else the write above is a visible one, after which no companion counts
    _check(held, update, store)
    with hu.kernels.engine("llvm"):
        compiled = read_float32_weights([plan])[0]
    assert hu.kernels.same_bits(compiled, held.weight)


def test_an_infinity_over_low_bits_may_be_a_float32_beyond_bfloat16s_largest():
    held = Adder("split", torch.full((2,), 3.4e38))
    held.fill(torch.tensor([3.4e38, -3.4e38]))
    assert held.parameter.detach().isinf().all()
    assert torch.equal(held.weight, torch.tensor([3.4e38, -3.4e38]))
    plan = held.plan
    plan.weight_tensors[1].fill_(7)  # which no float32 weight leaves beside an infinity
    assert torch.equal(held.weight, torch.tensor([torch.inf, -torch.inf]))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("update", "store"), CASES)
def test_an_update_of_exactly_zero_writes_nothing(seed, update, store):
    held = Adder(update, torch.randn(2048), store)
    for _ in range(3):
        held.add(torch.randn(2048) * 2.0**-8)
    parts = [part.clone() for part in held.plan.weight_tensors]
    for _ in range(5):
        held.add(torch.zeros(2048))
    for part, before in zip(held.plan.weight_tensors, parts):
        assert torch.equal(part, before)  # but for the sign of a zero
