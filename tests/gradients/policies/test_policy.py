"""Policies follow their published equations, step by step, against brute force."""

import dataclasses
import math
import random

import pytest
import torch
from torch import nn

import halfulp as hu
from halfulp.formats import Format, get
from halfulp.gradients import (
    AbsRange,
    Amax,
    Constant,
    Dynamic,
    ElementWise,
    Measured,
    Policy,
    RisingFloor,
    UnderflowBound,
)
from halfulp.gradients._site import GradientReading, Site

from ..exponents import Spiked, batch, mean_square, mlp, own, sites, stepped

OWN = Format("e6m3", exponent_bits=6, mantissa_bits=3)
SITES = ("0", "2", "4")


def true_amax(model, x, unit=0.0, least=None):
    """The largest gradient of each kind at each site of `mlp()`, by hand, and how far off roundings may leave it.

    A rounding is off by ``unit`` of its operand, or by ``least[site]``; through products errors add up as magnitudes.
    """
    layers = [layer for layer in model if isinstance(layer, torch.nn.Linear)]
    inputs = [x.double()]
    for layer in layers:
        h = inputs[-1] @ layer.weight.detach().double().t() + layer.bias.detach().double()
        inputs.append(h.tanh())
    slopes = [*(1 - out.square() for out in inputs[1:3]), torch.ones_like(h)]
    found = {}
    gradient, off = 2 * h / h.numel(), torch.zeros_like(h)
    for key, layer, into, slope in reversed(list(zip(SITES, layers, inputs, slopes))):
        tiny, weight = least[key] if least else 0.0, layer.weight.detach().double()

        def rounded(g, e, tiny=tiny):
            return g, e + unit * (g.abs() + e) + tiny

        received = rounded(gradient, off)
        gradient, off = rounded(received[0] * slope, received[1] * slope)
        both = rounded(gradient.t() @ into, off.t() @ into.abs()), rounded(gradient.sum(0), off.sum(0))
        gradient, off = passed = rounded(gradient @ weight, off @ weight.abs())
        found[key] = {"received": [received], "passed": [passed] if key != "0" else [], "weight": both}
    return {key: {kind: _largest(pairs) for kind, pairs in kinds.items()} for key, kinds in found.items()}


def _largest(pairs):
    """The largest magnitude of tensors beside their errors, and its own error; twice, as float32 rounds too."""
    if not pairs:
        return None
    return max(g.abs().max().item() for g, _ in pairs), 2 * max(e.max().item() for _, e in pairs)


def least(amax, top, headroom):
    """The equation of `Amax`."""
    return min(top - headroom - math.floor(math.log2(value)) for kind, value in amax.items() if value)


def run(scaler, model, loss, steps=6):
    """So many steps; what the table held after each, and the exponents before the last."""
    tables = []
    for _ in range(steps):
        before = sites(scaler)
        assert stepped(scaler, model, loss)
        tables.append({row.site: row.amax for row in scaler.sites().rows[1:]})
    return tables, before


def recent(tables, site):
    """The largest of the last four measurements, by kind."""
    return {kind: max(table[site][kind] or 0.0 for table in tables[-4:]) for kind in tables[-1][site]}


def assert_near(amax, expected):
    for kind, pair in expected.items():
        assert (amax[kind] is None) == (pair is None)
        assert pair is None or abs(amax[kind] - pair[0]) <= pair[1] + 1e-5 * pair[0], kind


@pytest.mark.parametrize(
    ("format", "top"), [("fp16", 15), ("e5m2", 15), ("e4m3fn", 8), ("bf16", 15), (torch.float16, 15), (OWN, 15)]
)
@pytest.mark.parametrize("headroom", [1, 3, 5])
def test_amax_is_its_equation(format, top, headroom, seed):
    model, x = mlp(), batch()
    scaler = hu.AdaptiveGradScaler(model, format=format, interval=1, init_scale=2.0**6, policy=Amax(headroom))
    tables, before = run(scaler, model, lambda: mean_square(model(x)))
    stored = get(format)
    tiny = {key: math.ldexp(stored.smallest_subnormal / 2, -before[key]) for key in SITES}
    expected = true_amax(model, x, stored.eps / 2, tiny)
    for key, exponent in own(scaler).items():
        assert exponent == least(recent(tables, key), top, headroom), key
        assert_near(tables[-1][key], expected[key])
    assert {row.format for row in scaler.sites().rows[1:]} == {stored.name}


@pytest.mark.parametrize(("format", "room"), [("fp16", 8), ("e5m2", 5), ("e4m3fn", 3), ("e3m4", 1), ("e2m1fn", 0)])
def test_formats_of_few_binades_leave_less_of_them_free(format, room):
    site = Site("model", None, 0)
    site.store_readings({"received": GradientReading(1.0, 0.0, 0.0, 10, get(format))})
    assert Amax().exponent(site) == min(get(format).emax, 15) - room
    assert Amax(headroom=4).exponent(site) == min(get(format).emax, 15) - 4


@pytest.mark.sampled(1)
@pytest.mark.parametrize("format", ["e3m4", "e4m3fn", "e5m2", "fp16"])
@pytest.mark.parametrize("start", ["low", "high", "highest"])
def test_exponents_settle_from_any_start(format, start, seed):
    """Between an overflow and zeros alone lies a step that is found, however narrow the format."""
    model, x = mlp(), batch(64)
    start = {"low": random.randint(-20, 10), "high": random.randint(11, 40), "highest": 40}[start]
    scaler = hu.AdaptiveGradScaler(model, format=format, init_scale=2.0**start)
    applied = [stepped(scaler, model, lambda: mean_square(model(x)), lr=1e-3) for _ in range(40)]
    assert all(applied[16:]), applied
    zeros = {row.site: row.zero for row in scaler.sites() if row.site != "global"}
    assert all(zero < 0.5 for zero in zeros.values()), zeros


@pytest.mark.parametrize("start", [16, 8, 0])
def test_one_measured_scale_falls_by_as_much_from_anywhere(start, seed):
    model, x = mlp(), batch()
    scaler = hu.AdaptiveGradScaler(model, format="e5m2", policy="measured", interval=1)
    assert stepped(scaler, model, lambda: mean_square(model(x)))
    scaler.set_exponents({"global": start})
    assert not stepped(scaler, model, lambda: mean_square(model(x)), infinite=True)
    assert scaler.get_scale() == 2.0 ** (start - 8)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("policy", ["measured", "amax", "dynamic", "rising-floor", "underflow-bound"])
def test_a_loss_in_float16_that_overflows_is_remembered(policy, dtype, seed):
    """Its gradient is the scale itself, which float16 holds up to 2^15; what the model's gradients allow is more."""
    model, x = mlp(), batch(64)
    scaler = hu.AdaptiveGradScaler(model, policy=policy)
    applied = []

    def loss():
        with torch.autocast("cpu", dtype=torch.float16):
            return mean_square(model(x).half()).to(dtype)

    for _ in range(200):
        applied.append(stepped(scaler, model, loss, lr=1e-3))
    assert applied[:100].count(False) <= 8
    # The memory of an overflow lasts longer each time.
    assert applied[100:].count(False) <= 5


def test_rules_of_operands_settle_short_of_what_they_do_not_see(seed):
    """A weight's gradient is a sum that no such rule looks at: without memory every other step would overflow."""
    skipped = 0
    for _ in range(8):
        model, x = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)), 2.0**14 * batch(256)
        scaler = hu.AdaptiveGradScaler(model, format="fp16", policy="element-wise", init_scale=1.0)
        applied = [stepped(scaler, model, lambda model=model, x=x: mean_square(model(x)) * 2.0**-28) for _ in range(80)]
        skipped += applied[20:].count(False)
    assert skipped <= 24


def test_amax_remembers_the_largest_of_the_last_measurements(seed):
    model, x = nn.Sequential(*mlp(), Spiked()), batch()
    scaler = hu.AdaptiveGradScaler(model, format="fp16", interval=1, init_scale=2.0**4, policy=Amax(8, measurements=3))
    factors = [0, 0, 0, 0, 3, 1, 0, 0, 0, -2, -4, -1, -1, -1, -1]
    trail = []
    for power in factors:
        model[-1].spike = 2.0**power
        assert stepped(scaler, model, lambda: mean_square(model(x)))
        trail.append(own(scaler))
    base = trail[3]
    for step in range(3, len(factors)):
        recent = max(factors[step - 2 : step + 1])
        assert trail[step] == {key: exponent - recent for key, exponent in base.items()}, step


def test_amax_under_autocast_is_its_equation(seed):
    model, x = mlp(), batch()
    scaler = hu.AdaptiveGradScaler(model, interval=1, init_scale=2.0**6, policy=Amax(3))

    def loss():
        with torch.autocast("cpu", torch.float16):
            return mean_square(model(x))

    tables, _ = run(scaler, model, loss)
    for key in SITES:
        assert sites(scaler)[key] == least(recent(tables, key), 15, 3), key
        for kind, pair in true_amax(model, x)[key].items():  # the forward pass is rounded too
            assert pair is None or math.isclose(tables[-1][key][kind], pair[0], rel_tol=0.2)


def test_amax_lets_wide_gradients_be(seed):
    model, x = mlp(), batch()
    scaler = hu.AdaptiveGradScaler(model, interval=1, init_scale=2.0**5)
    for _ in range(4):
        stepped(scaler, model, lambda: mean_square(model(x)))
    assert set(sites(scaler).values()) == {5}
    assert {row.format for row in scaler.sites().rows} == {None}


def test_zero_gradients_leave_exponents(seed):
    model, x = mlp(), batch()
    scaler = hu.AdaptiveGradScaler(model, format="fp16", interval=1, init_scale=2.0**5)
    for _ in range(4):
        assert stepped(scaler, model, lambda: mean_square(model(x)) * 0)
    assert set(sites(scaler).values()) == {5}


@pytest.mark.parametrize(("floor", "ceiling"), [(-30, 3), (3, 5), (12, 60), (4, 4)])
def test_floor_and_ceiling_hold_every_exponent(floor, ceiling, seed):
    model, x = mlp(), batch()
    options = {"format": "fp16", "interval": 1}
    free = hu.AdaptiveGradScaler(model, **options, init_scale=16.0)
    for _ in range(6):
        stepped(free, model, lambda: mean_square(model(x)))
    wanted = {key: max(floor, min(ceiling, exponent)) for key, exponent in sites(free).items()}
    free.detach()
    start = 2.0 ** max(floor, min(ceiling, 4))
    bound = hu.AdaptiveGradScaler(model, **options, init_scale=start, floor=floor, ceiling=ceiling)
    for _ in range(6):
        stepped(bound, model, lambda: mean_square(model(x)))
        assert all(floor <= exponent <= ceiling for exponent in sites(bound).values())
    if floor <= 4:  # above, the floor itself may overflow
        assert sites(bound) == wanted


def run_with(policy, overflows, start, steps):
    model, x = mlp(), batch()
    scaler = hu.AdaptiveGradScaler(model, policy=policy, init_scale=2.0**start)
    found = []
    for step in range(1, steps + 1):
        assert stepped(scaler, model, lambda: mean_square(model(x)), infinite=step in overflows) is (
            step not in overflows
        )
        found.append(int(math.log2(scaler.get_scale())))
        assert set(sites(scaler).values()) <= {found[-1]}
    return found


def test_dynamic_doubles_after_an_interval_and_halves_on_overflow(seed):
    interval, overflows = 5, {7, 8, 14, 20}
    wanted, exponent, good = [], 10, 0
    for step in range(1, 31):
        good = 0 if step in overflows else good + 1
        exponent -= step in overflows
        if good == interval:
            exponent, good = exponent + 1, 0
        wanted.append(exponent)
    assert run_with(Dynamic(growth_interval=interval), overflows, 10, 30) == wanted


def test_the_rising_floor_is_a_schedule(seed):
    overflows = set(range(2, 31, 2))
    wanted, exponent = [], 6
    for step in range(1, 31):
        exponent -= step in overflows
        if step >= 8:
            exponent = max(exponent, 13 if step >= 20 else 5)
        wanted.append(exponent)
    assert run_with(RisingFloor(floors=((8, 5), (20, 13))), overflows, 6, 30) == wanted
    assert min(wanted[:7]) < 5
    assert wanted[7:19] == [5] * 12
    assert wanted[19:] == [13] * 11


def test_the_papers_floors_are_the_default():
    policy = RisingFloor()
    assert policy.global_exponent(3, True, 0, 39_999) == 2
    assert policy.global_exponent(3, True, 0, 40_000) == 13
    assert policy.global_exponent(13, True, 0, 149_999) == 13
    assert policy.global_exponent(13, True, 0, 150_000) == 15
    assert policy.global_exponent(16, False, 2000, 150_000) == 17


def test_constant_never_moves(seed):
    assert run_with(Constant(), {3, 4, 5}, 7, 10) == [7] * 10


@pytest.mark.parametrize("headroom", [0, 1, 4])
def test_measured_is_the_least_that_any_gradient_allows(headroom, seed):
    model, x = mlp(), batch()
    scaler = hu.AdaptiveGradScaler(
        model, policy=Measured(headroom=headroom), format="fp16", interval=1, init_scale=2.0**4
    )
    tables, before = run(scaler, model, lambda: mean_square(model(x)))
    every = {(key, kind): value for key in SITES for kind, value in recent(tables, key).items()}
    assert int(math.log2(scaler.get_scale())) == least(every, 15, headroom)
    expected = true_amax(model, x, 2.0**-11, dict.fromkeys(SITES, 2.0 ** (-25 - before["global"])))
    for key in SITES:
        assert_near(tables[-1][key], expected[key])
    assert {row.merged for row in scaler.sites().rows if row.site != "global"} == {"one scale for all"}


PUBLISHED = [
    UnderflowBound(),
    ElementWise(),
    AbsRange(),
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("policy", PUBLISHED, ids=repr)
@pytest.mark.parametrize(("format", "power"), [("fp16", -16), ("e5m2", -8), (None, -16)])
def test_published_policies_train_and_react(policy, format, power, seed):
    """Gradients that a product passes on in parts only: exponents rise from 0."""
    model, x = mlp(), batch()
    scaler = hu.AdaptiveGradScaler(model, policy=policy, init_scale=1.0, interval=2, format=format)

    def loss():
        with torch.autocast("cpu", torch.float16, enabled=format is None):
            return mean_square(model(x)) * 2.0**power

    applied = [stepped(scaler, model, loss, lr=0.1) for _ in range(20)]
    assert all(applied[8:])
    assert max(sites(scaler)[key] for key in SITES) > 0
    assert all(p.isfinite().all() for p in model.parameters())


@dataclasses.dataclass(frozen=True)
class Watching(Policy):
    """Asks for operands, by the base class alone."""

    wants_operands = True

    def exponent(self, site):
        return None


def test_a_policy_that_wants_operands_need_not_propose(seed):
    model, x = mlp(), batch()
    scaler = hu.AdaptiveGradScaler(model, policy=Watching(), init_scale=1.0, interval=1, format="e5m2")
    assert stepped(scaler, model, lambda: mean_square(model(x)))
    assert set(sites(scaler).values()) == {0}


def test_the_largest_demand_holds_and_then_the_smallest_limit(seed):
    policy, global_site = UnderflowBound(), Site("global", None, 0)
    site = Site("matmul", global_site, 3)
    for proposals, wanted in (([(5, 20), (9, 30)], 9), ([(5, 7), (9, 30)], 7), ([(2, 1)], 1), ([], None)):
        site.proposed_bounds = proposals
        assert policy.exponent(site) == wanted


ENDS = {
    "Amax.headroom": (lambda x: Amax(headroom=x), 0, 30),
    "Amax.measurements": (lambda x: Amax(measurements=x), 1, 64),
    "Measured.headroom": (lambda x: Measured(headroom=x), 0, 30),
    "Dynamic.growth_interval": (lambda x: Dynamic(growth_interval=x), 1, 10**9),
    "RisingFloor.growth_interval": (lambda x: RisingFloor(growth_interval=x), 1, 10**9),
}


@pytest.mark.parametrize("name", ENDS)
def test_an_option_is_an_integer_between_its_ends(name):
    make, low, high = ENDS[name]
    field = name.partition(".")[2]
    for allowed in (low, high):
        assert getattr(make(allowed), field) == allowed
    for refused in (low - 1, high + 1, 2.0, True, "3"):
        with pytest.raises(ValueError, match=f"{field} is an integer from {low} to {high}, got {refused!r}"):
            make(refused)


@pytest.mark.parametrize(
    ("floors", "is_allowed"),
    [
        *((((0, 1),), True), (((0, 5), (1, 3)), True)),
        *((((-1, 1),), False), (((4, 1), (4, 2)), False), (((5, 1), (4, 2)), False)),
    ],
)
def test_floors_rise_by_their_steps(floors, is_allowed):
    if is_allowed:
        policy = RisingFloor(floors=floors)
        steps = [step for step, _ in floors]
        for step in range(6):
            floor = max([low for start, low in floors if step >= start])
            assert policy.global_exponent(-9, False, 1, step) == floor
        assert policy.global_exponent(7, False, policy.growth_interval, steps[-1]) == 8
    else:
        with pytest.raises(ValueError, match="by rising steps"):
            RisingFloor(floors=floors)


@pytest.mark.parametrize(("since", "exponent"), [(2, 5), (3, 6), (4, 6)])
def test_a_dynamic_scale_doubles_after_its_interval_and_not_a_step_before(since, exponent):
    policy = Dynamic(growth_interval=3)
    assert policy.global_exponent(5, False, since, 10) == exponent
    assert policy.global_exponent(5, True, since, 10) == 4
