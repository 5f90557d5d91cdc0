"""Weight updates without a companion, and the float32 master."""

import pytest
import torch

import halfulp as hu
from halfulp.kernels import same_bits

from ...laws.optim.cases import RULES, Adder

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.mark.parametrize("store", [*DTYPES, "e4m3fn", "e8m3"])
def test_nearest_rounds_the_float32_sum(seed, store):
    held = Adder("nearest", torch.randn(4096), store)
    for _ in range(10):
        u = torch.randn(4096) * 2 ** torch.empty(4096).uniform_(-12, 0)
        wanted = held.parameter.detach().float() + u
        held.add(u)
        rounded = wanted.to(DTYPES[store]) if store in DTYPES else hu.quantize(wanted, store)
        assert same_bits(held.parameter.detach(), rounded)


@pytest.mark.parametrize("store", DTYPES)
def test_master_is_float32_and_shows_its_nearest(seed, store):
    start = torch.randn(4096).to(DTYPES[store])
    held, whole = Adder("master", start.float(), store), start.float()
    for _ in range(20):
        u = torch.randn(4096) * 2 ** torch.empty(4096).uniform_(-20, 0)
        held.add(u)
        whole = whole + u
        assert torch.equal(held.part("master"), whole)
        assert torch.equal(held.parameter.detach(), whole.to(DTYPES[store]))


def test_the_parameter_has_the_last_word_over_its_master():
    held = Adder("master", torch.ones(4))
    held.add(torch.full((4,), 2.0**-12))
    with torch.no_grad():
        held.parameter[0] = 3.0
    held.add(torch.full((4,), 2.0**-12))
    assert held.part("master").tolist() == [3 + 2.0**-12] + [1 + 2.0**-12] * 3


def test_float32_parameters_add_in_float32(seed):
    start = torch.randn(4096)
    held = Adder("exact", start, "fp32", engine="llvm")
    u = torch.randn(4096) * 1e-3
    held.add(u)
    assert torch.equal(held.parameter.detach(), start + u)
    for dtype, options in ((torch.bfloat16, {}), (torch.float32, {"format": "e8m3"})):
        with pytest.raises(ValueError, match="float32 parameters"):
            hu.optim.SGD([torch.nn.Parameter(torch.zeros(2, dtype=dtype))], weight_update="exact", **options)


def test_stochastic_bits_depend_on_seed_step_name_and_index_only(seed):
    def run(numbers, seed_, name, steps=1):
        parameter = torch.nn.Parameter(numbers.clone())
        optimizer = hu.optim.SGD([(name, parameter)], lr=1.0, weight_update="stochastic", seed=seed_)
        for _ in range(steps):
            parameter.grad = torch.full_like(parameter, 2.0**-9)
            optimizer.step()
        return parameter.detach()

    ones = torch.ones(512).bfloat16()
    first = run(ones, 0, "a")
    torch.manual_seed(99)
    torch.rand(7)
    assert torch.equal(first, run(ones, 0, "a"))
    assert not torch.equal(first, run(ones, 1, "a"))
    assert not torch.equal(first, run(ones, 0, "b"))
    second = run(ones, 0, "a", 2)
    assert not torch.equal((second != first), (first != ones))


def _drift(update, steps=600, elements=4000):
    """Deviation over elements of the share of a constant update that was kept, and its mean."""
    w = (torch.rand(elements) + 1).bfloat16()
    parameter = torch.nn.Parameter(w.clone())
    parameter.grad_dtype = None
    optimizer = hu.optim.SGD([parameter], lr=0.1, momentum=0.9, weight_update=update, state_dtype=torch.float32)
    parameter.grad = torch.full((elements,), -(2.0**-12))
    for _ in range(steps):
        optimizer.step()
    whole = (steps - 9 * (1 - 0.9**steps)) * 2.0**-12
    kept = (parameter.detach().double() - w.double()) / whole
    return float(kept.std()), float(kept.mean())


def test_it_is_right_on_average_with_far_less_noise_than_stochastic_rounding(seed):
    (noise, mean), (plain, plain_mean) = _drift("feedback"), _drift("stochastic")
    assert abs(mean - 1) < 0.03
    assert abs(plain_mean - 1) < 0.03
    assert noise < plain / 4


def _optimizer(update="feedback", lr=0.01, states=None):
    parameter = torch.nn.Parameter(torch.randn(64).bfloat16())
    optimizer = hu.optim.AdamW([parameter], lr=lr, weight_update=update, state_dtype=states)
    parameter.grad = torch.randn(64).bfloat16()
    return parameter, optimizer


@pytest.mark.parametrize("factors", [(2.0,), (0.5,), (0.0, 0.0), (1.5, 1.5)])
def test_rates_may_change(factors):
    parameter, optimizer = _optimizer()
    optimizer.step()
    for factor in factors:
        optimizer.param_groups[0]["lr"] *= factor
        optimizer.step()
    assert parameter.detach().isfinite().all()
    assert optimizer.state[parameter]["exp_avg"].isfinite().all()


def test_nothing_is_put_in_while_the_rate_is_zero():
    a, first = _optimizer("feedback", 0.0, torch.float32)
    b, second = _optimizer("stochastic", 0.0, torch.float32)
    b.grad = a.grad.clone()
    first.step()
    second.step()
    assert torch.equal(first.state[a]["exp_avg"], second.state[b]["exp_avg"])


@pytest.mark.parametrize("kind", [hu.optim.Lion, hu.optim.SGD])
def test_rules_without_a_moment_to_use_refuse_it(kind):
    with pytest.raises(ValueError, match="feedback"):
        kind([torch.nn.Parameter(torch.zeros(2).bfloat16())], lr=0.1, weight_update=hu.Feedback())


# How much may be missing, in ulps: Adam's debts of its first steps are held in units of a step that still shrinks.
EXACT, FIRST_STEPS = 0.02, 1.0
REPAID = {
    "momentum": ("SGD", {"lr": 0.1, "momentum": 0.9}, EXACT),
    "dampened": ("SGD", {"lr": 0.1, "momentum": 0.8, "dampening": 0.5}, EXACT),
    "nesterov": ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}, EXACT),
    "adam": ("Adam", {"lr": 2.0**-12, "betas": (0.5, 0.99)}, FIRST_STEPS),
    "adamw": ("AdamW", {"lr": 2.0**-12, "betas": (0.5, 0.99), "weight_decay": 0.0}, FIRST_STEPS),
}


@pytest.mark.parametrize("rule", REPAID)
def test_later_updates_sum_to_what_was_lost(seed, rule):
    """From where a narrow run stands, float64's updates lead to where float64 is without any rounding."""
    name, options, ulps = REPAID[rule]
    start, gradient, steps, later = torch.rand(64) * 0.5 + 1.2, torch.randn(64) * 2.0**-10, 200, 300
    narrow = torch.nn.Parameter(start.bfloat16())
    narrow.grad_dtype = None
    optimizer = getattr(hu.optim, name)(
        [narrow], weight_update="feedback", state_dtype=torch.float32, seed=seed, report_interval=0, **options
    )
    narrow.grad = gradient
    whole = torch.nn.Parameter(narrow.detach().double())
    exact = getattr(torch.optim, name)([whole], **options)
    with hu.kernels.engine("reference"):
        for _ in range(steps):
            optimizer.step()
    resumed = torch.nn.Parameter(narrow.detach().double())
    other = getattr(torch.optim, name)([resumed], **options)
    state = {key: torch.as_tensor(value, dtype=torch.float64) for key, value in optimizer.state[narrow].items()}
    other.state[resumed] = state
    for optimizer, parameter, count in ((exact, whole, steps + later), (other, resumed, later)):
        parameter.grad = gradient.double()
        for _ in range(count):
            optimizer.step()
    moved = (whole.detach() - start.bfloat16()).abs().max()
    assert moved > 2 * 2.0**-7, "the steps must be worth something"
    assert (resumed - whole).abs().max() <= ulps * 2.0**-7


def test_every_rule_that_repays_is_held_to_it():
    def rule(kind, options):
        optimizer = kind([torch.zeros(1, 1, requires_grad=True)], **options)
        return optimizer.rule(optimizer.param_groups[0])

    held = {rule(getattr(hu.optim, name), options) for name, options, _ in REPAID.values()}
    assert {found for found in (rule(*given) for given in RULES.values()) if found.error_feedback is not None} <= held
