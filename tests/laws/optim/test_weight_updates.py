"""Law: every weight update keeps to its stated precision, NaN, infinities, weight decay and small updates."""

import pytest
import torch

import halfulp as hu
from halfulp.kernels import same_bits
from halfulp.optim.weight_updates._weight_update import find_weight_update

from .cases import UPDATES, WITH_ORACLE, Adder, allowed, build, decoded, narrow_updates, stored_updates

# Weight and companions stand for a value to within 2^-bits of it; a new weight update states its own.
KEEPS = {
    "nearest": 8,
    "stochastic": 7,
    "feedback": 7,
    "kahan": 15,
    "kahan-nearest": 16,
    "kahan-weight-stochastic": 15,
    "kahan-stochastic": 14,
    "kahan-literal": 8,
    "components": 16,
    "components-3": 22,
    "components-3-stochastic": 21,
    "components-4": 22,
    "split": 24,
    "split8": 15,
    "split-stochastic": 23,
    "master": 24,
}
# float16 has three bits more in the parameter, and in every component.
KEEPS_FP16 = {name: bits + {7: 3, 8: 3, 21: 0, 22: 0, 24: 0}.get(bits, 4) for name, bits in KEEPS.items()} | {
    "split8": 18,
    "kahan-literal": 12,
}


@pytest.mark.parametrize("update", narrow_updates())
def test_a_weight_update_states_what_it_keeps(update):
    assert update in KEEPS, f"say in KEEPS to how many bits {update!r} keeps a weight"


@pytest.mark.parametrize(("update", "store"), [(u, s) for u, s in stored_updates("sgd") if s in ("bf16", "fp16")])
def test_one_update_lands_within_the_stated_precision(seed, update, store):
    w = torch.empty(4096).uniform_(0.5, 4) * (torch.randint(0, 2, (4096,)) * 2 - 1)
    held = Adder(update, w, store, seed)
    bits = (KEEPS if store == "bf16" else KEEPS_FP16)[update]
    for scale in (1.0, 2**-4, 2**-7, 2**-10, 2**-13):
        u = torch.randn(4096) * scale * 0.1
        before = held.weight.double()
        held.add(u)
        wanted = before + u
        size = torch.maximum(wanted.abs(), before.abs())
        assert ((held.weight.double() - wanted).abs() <= 2.0**-bits * size).all(), scale


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("update", "store"), stored_updates("sgd"))
def test_fill_makes_the_nearest_parameter_and_reads_back(seed, update, store):
    values = torch.randn(2048)
    if store in ("e4m3fn", "e8m1"):
        values = values.abs().clamp(2**-6, 400) * values.sign()
    held = Adder(update, torch.zeros(2048), store, seed)
    held.fill(values)
    if store in ("bf16", "fp16"):
        nearest = values.to(held.parameter.dtype).float()
        if update in ("split", "split-stochastic"):  # ties away from zero
            assert ((held.parameter.float() - values).abs() == (nearest - values).abs()).all()
        elif update == "split8":  # the 24-bit value is what it is nearest to
            ulp = values.abs() * 2.0**-15
            assert ((held.parameter.float() - values).abs() <= (nearest - values).abs() + ulp).all()
        else:
            assert torch.equal(held.parameter.float(), nearest)
        bits = (KEEPS if store == "bf16" else KEEPS_FP16)[update]
        assert ((held.weight - values).abs() <= values.abs() * 2.0 ** -min(bits, 24) + 2.0**-25).all()
    elif update != "exact":
        assert torch.equal(held.parameter.detach(), hu.quantize(values, held.optimizer.param_groups[0]["format"]))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("update", "store"), stored_updates("sgd"))
def test_the_parameter_holds_values_of_its_store(seed, update, store):
    held = Adder(update, torch.randn(1024), store, seed)
    for _ in range(3):
        held.add(torch.randn(1024) * 0.01)
    if "format" in held.optimizer.param_groups[0] and held.optimizer.param_groups[0]["format"] is not None:
        value = held.parameter.detach()
        assert torch.equal(value, hu.quantize(value, held.optimizer.param_groups[0]["format"]))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("update", "store"), [*stored_updates("sgd"), ("exact", "fp32")])
def test_nan_in_nan_out_and_only_there(seed, update, store):
    w = torch.ones(64)
    w[::4] = torch.nan
    u = torch.full((64,), 2.0**-3)
    u[1::4] = torch.nan
    held = Adder(update, w, store, seed)
    held.add(u)
    expected = (torch.arange(64) % 4) < 2
    assert torch.equal(held.parameter.detach().isnan(), expected)
    assert torch.equal(held.weight.isnan(), expected)
    held.add(torch.zeros(64))
    assert torch.equal(held.parameter.detach().isnan(), expected)


LARGEST = {"fp16": 65504.0, "fp16-in-fp32": 65504.0, "e5m2": 57344.0, "e4m3fn": 448.0, "e8m1": 1.5 * 2.0**127}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("update", "store"), stored_updates("sgd"))
def test_what_overflows_follows_the_format_and_leaves_no_nan_behind(seed, update, store):
    largest = LARGEST.get(store, 3.3e38)
    held = Adder(update, torch.tensor([largest, -largest]), store, seed)
    held.add(torch.tensor([largest, -largest]))
    policy = hu.formats.get(torch.bfloat16 if store == "bf16" else store.removesuffix("-in-fp32")).overflow
    shown = {"inf": torch.inf, "nan": torch.nan, "saturate": largest}[policy]
    expected = torch.tensor([shown, -shown])
    assert same_bits(held.parameter.detach().float(), expected)
    if policy == "inf" and update != "master":  # whose float32 copy goes on
        assert torch.equal(held.weight, expected), "a companion of an infinite weight is no zero"
    held.fill(torch.tensor([torch.inf, -torch.inf]))
    assert not held.weight.isnan().any() or policy == "nan"


@pytest.mark.parametrize("update", [u for u in narrow_updates() if u != "nearest"])
def test_weight_decay_is_not_lost(update):
    """w (1 - lr wd)^500, on 20,000 elements."""
    start = torch.randn(20_000, generator=torch.Generator().manual_seed(0)).bfloat16() * 0.02
    parameter = torch.nn.Parameter(start.clone())
    optimizer = build("adamw", update, [parameter], lr=4e-3, weight_decay=0.1)
    parameter.grad = torch.zeros_like(start)
    for _ in range(500):
        optimizer.step()
    kept = (decoded(optimizer, parameter).double() * start.double().sign()).sum() / start.double().abs().sum()
    limit = {"kahan-nearest": 0.01, "components": 0.01, "kahan-literal": 0.2}.get(update, 0.001)
    assert abs(float(kept) - 0.8187) <= limit


def test_nearest_loses_weight_decay():
    start = torch.randn(4096).bfloat16()
    parameter = torch.nn.Parameter(start.clone())
    optimizer = build("adamw", "nearest", [parameter], lr=1e-3, weight_decay=0.1)
    parameter.grad = torch.zeros_like(start)
    for _ in range(50):
        optimizer.step()
    assert torch.equal(parameter.detach(), start)


# float32 sums themselves round an update of 2^-21 to a few of their last places.
DRIFT = {
    "split-stochastic": 0.002,
    "kahan": 0.01,
    "kahan-stochastic": 0.01,
    "split8": 0.05,
    "master": 0.05,
    "components-3": 0.05,
    "split": 0.05,
}


@pytest.mark.parametrize(("update", "limit"), DRIFT.items())
def test_a_small_constant_update_is_kept(seed, update, limit):
    """|u|/|w| = 2^-21, of which a nearest bfloat16 residual keeps a fifth."""
    w = (torch.rand(20_000) * 0.02 + 0.01).bfloat16().float()
    held = Adder(update, w, seed=seed, engine="llvm")
    u, steps = w * 2.0**-21, 1000
    for _ in range(steps):
        held.add(u)
    kept = (held.weight.double() - w.double()).sum() / (steps * u.double()).sum()
    assert abs(float(kept) - 1) <= limit


@pytest.mark.parametrize(("update", "limit"), [("kahan", 0.05), ("split-stochastic", 0.01)])
@pytest.mark.parametrize("size", [1e-7, 1e-8])
def test_an_update_below_float32s_own_rounding_is_kept(seed, update, limit, size):
    """Where w + u in float32 is biased by up to a half, or is w."""
    w = (torch.rand(50_000) + 1).bfloat16().float()
    held = Adder(update, w, seed=seed, engine="llvm")
    u, steps = w * size, 500
    for _ in range(steps):
        held.add(u)
    kept = (held.weight.double() - w.double()).sum() / (steps * u.double()).sum()
    assert abs(float(kept) - 1) <= limit


def test_a_nearest_residual_stalls_there():
    w = (torch.rand(20_000) * 0.02 + 0.01).bfloat16().float()
    held = Adder("kahan-nearest", w, engine="llvm")
    for _ in range(2000):
        held.add(w * 2.0**-21)
    assert (held.weight - w).sum() / (2000 * w * 2.0**-21).sum() < 0.5


@pytest.mark.parametrize("update", [u for u in UPDATES if u != "exact"])
def test_to_dict_is_plain_and_makes_the_same_again(update):
    given = UPDATES[update]
    plain = given.to_dict()
    assert all(isinstance(value, str | int | bool) for value in plain.values())
    assert find_weight_update(plain) == given
    assert type(find_weight_update(plain)) is type(given)


@pytest.mark.parametrize(("rule", "update"), [(rule, "feedback") for rule in WITH_ORACLE])
def test_feedback_is_refused_where_there_is_no_first_moment_to_put_it(rule, update):
    assert allowed(rule, update, "bf16") == (rule in ("momentum", "nesterov", "adam", "adamw"))


@pytest.mark.parametrize("update", ["split", "split8", "kahan", "master", "components"])
def test_float32_parameters_are_their_own_master(update):
    parameter, narrow = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    optimizer = build("adamw", update, [parameter, narrow], "bf16")
    assert optimizer.param_groups[0]["weight_update"].name == UPDATES[update].name
    parameter.grad = torch.ones(2)
    optimizer.step()
    assert set(optimizer.state[parameter]) == {"step", "exp_avg", "exp_avg_sq"}
