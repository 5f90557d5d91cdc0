"""A scale that changes in a step changes no weight: payload and companions are rescaled as one number."""

import itertools

import pytest
import torch

import halfulp as hu
from halfulp.kernels import engine, same_bits
from halfulp.optim._storage import PAYLOAD_STORE_BY_DTYPE
from halfulp.optim.step._scales import PAYLOAD_BINADE_WINDOW_BY_DTYPE
from halfulp.scaled import ScaledTensor

from .. import samples
from ..laws.optim.cases import UPDATES, write_update

SCALING = [name for name, update in UPDATES.items() if update.scales]


def _goes(update, dtype):
    store = PAYLOAD_STORE_BY_DTYPE[dtype]
    try:
        UPDATES[update].check_store(store)
    except ValueError:
        return False
    return dtype != torch.float32 or not UPDATES[update].describe_auxiliary_tensors(store)


def _accompanied(update, store):
    """Parts with live companions, of all sizes down to subnormals."""
    value = torch.randn(400) * 2.0 ** torch.linspace(store.emin - 4, 6, 400).round()
    names = update.describe_auxiliary_tensors(store)
    parts = [torch.zeros(400, dtype=dtype) for dtype in (store.dtype, *(dtype for _, dtype in names))]
    update.fill(store, parts, value)
    for _ in range(3):
        draws = [torch.randint(2**bits, (400,)) for bits in update.list_random_bits_per_draw(store)]
        write_update(update, store, parts, torch.randn(400) * value * 2.0 ** -(store.mantissa_bits + 3), draws)
    return parts


def _value(update, store, parts):
    """Payload plus companion in float64, as the equations of the updates say; a master is the value."""
    if update.name == "master":
        return parts[1].double()
    return sum(part.double() for part in parts)


def _middle(update, store):
    """Draws under which stochastic roundings round to nearest, and from which share of the least number up they do.

    Normal numbers look at the low bits of a draw, subnormal ones at the high bits: no draw is the middle of both.
    """
    low = 2 ** (22 - store.mantissa_bits)
    whole = [bits > 16 for bits in update.list_random_bits_per_draw(store)]
    draws = [torch.full((400,), 2**31 + low if has_high else low) for has_high in whole]
    return draws, 0.5 + low * 2.0**-32 * any(whole)


PAIRS = [pair for pair in itertools.product(SCALING, PAYLOAD_STORE_BY_DTYPE) if _goes(*pair)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("update", "dtype"), PAIRS, ids=str)
def test_payload_plus_companion_is_invariant_under_powers_of_two(seed, update, dtype):
    update, store = UPDATES[update], PAYLOAD_STORE_BY_DTYPE[dtype]
    least = 2.0**-149 if update.name == "master" else 2.0 ** (store.emin - store.mantissa_bits)
    start, (draws, share) = _accompanied(update, store), _middle(update, store)
    most = share * least + (2.0**-149 if least > 2.0**-149 else 0.0)  # each part's product is rounded in float32 first
    for exponent in (-20, -7, -3, -1, 1):
        parts = [part.clone() for part in start]
        wanted = _value(update, store, parts) * 2.0**exponent
        write_update(update, store, parts, torch.zeros(400), draws, ratio=2.0**exponent)
        error = (_value(update, store, parts) - wanted).abs()
        fits = wanted % least == 0
        assert not error[fits].any()
        assert (error <= most).all()
        assert torch.equal(update.read(store, parts), _value(update, store, parts).float()), "judged another's"


def test_infinite_and_nan_payloads_stay_so_and_get_no_companion(seed):
    for name, dtype in itertools.product(SCALING, (torch.float16, torch.bfloat16)):
        update, store = UPDATES[name], PAYLOAD_STORE_BY_DTYPE[dtype]
        if _goes(name, dtype):
            parts = _accompanied(update, store)
            parts[0][:3] = torch.tensor([torch.inf, -torch.inf, torch.nan])
            write_update(update, store, parts, torch.zeros(400), _middle(update, store)[0], ratio=0.5)
            assert parts[0][:2].tolist() == [torch.inf, -torch.inf]
            assert update.read(store, parts)[:2].tolist() == [torch.inf, -torch.inf]
            assert update.read(store, parts)[2].isnan()


def _walks(factors, steps, generator):
    """Weights under random scales, and where float32 goes from there: in each step by 2^-40 to 2^40, each power once.

    Of a row's elements some become new numbers of the new size, some 0, some move by that size, some stay.
    """
    count = len(factors)
    sizes = torch.randint(-30, 31, (count, 1), generator=generator).float()
    now = torch.randn(count, 24, generator=generator) * torch.exp2(sizes)
    now[:, ::3] = 0.0
    places = [now]
    for _ in range(steps):
        sizes = (sizes + factors[torch.randperm(count, generator=generator), None]).clamp(-70, 70)
        fresh = torch.randn(count, 24, generator=generator) * torch.exp2(sizes)
        fate = torch.randint(4, (count, 24), generator=generator)
        fate[:, 0] = 0
        moved = torch.where(fate == 0, fresh, torch.where(fate == 1, 0.0, torch.where(fate == 2, now + fresh, now)))
        now = torch.where(moved.abs() > 16 * torch.exp2(sizes), 0.0, moved)
        places.append(now)
    return places[0], places[1:]


def _place(store, values, scale):
    """The unit in the last place of a payload under a scale."""
    binade = torch.exp2(torch.frexp(values.double().abs() / scale)[1] - 1.0).clamp(min=2.0**store.emin)
    return binade * 2.0**-store.mantissa_bits * scale


def walk(update, dtype, factors, seed, chosen="reference", steps=3):
    """Step scaled parameters along random walks; returns what breaks the law, payloads and scales, float32 weights.

    The law: after each step a payload is float32's weight rounded once, under a scale that gives away no digit, and
    with its companion float32's weight to the companion's last place.
    """
    weights, targets = _walks(factors, steps, torch.Generator().manual_seed(seed))
    parameters = [torch.nn.Parameter(ScaledTensor.encode(w, dtype)) for w in weights]
    own = UPDATES[update]
    chosen_update = None if dtype == torch.float32 else own  # float32 needs none, and refuses one
    optimizer = hu.optim.SGD(parameters, lr=1.0, weight_update=chosen_update, seed=seed, report_interval=1)
    model, store, low = (
        torch.nn.ParameterList(parameters),
        PAYLOAD_STORE_BY_DTYPE[dtype],
        PAYLOAD_BINADE_WINDOW_BY_DTYPE[dtype][0],
    )
    rounding = (
        0.5 if not own.list_random_bits_per_draw(store) or getattr(own, "weight", "stochastic") == "nearest" else 1.0
    )
    held, broken = [p.detach().decode() for p in parameters], []
    with engine(chosen):
        for k, target in enumerate(targets):
            updates = [torch.where(t == w, 0.0, t - w) for t, w in zip(target, held)]
            for parameter, u in zip(parameters, updates):
                parameter.grad = ScaledTensor(-u, 1.0)
            optimizer.step()
            wanted = [w + u for w, u in zip(held, updates)]
            held = [value.clone() for value in optimizer.float32_state_dict(model).values()]
            for row, (parameter, value, u) in enumerate(zip(parameters, wanted, updates)):
                scale = parameter.scale.item()
                shown = parameter.payload.detach().double() * scale
                place = torch.maximum(_place(store, value, scale), _place(store, shown, scale))  # either side of 2^k
                slack = 2.0**-22 * u.abs().double() if own.compensates else 0.0  # u + c, not p + c, is rounded
                if update == "kahan-literal":  # which rounds the update itself, and the sums on the way
                    slack = slack + 4 * place + 4 * _place(store, u, scale)
                if not bool(((shown - value).abs() <= rounding * place + slack).all()):
                    broken.append((k, row, "payload"))
                fine = 2 * _place(store, place, scale) + slack if own.compensates else place * (own.name != "master")
                if not bool(((held[row].double() - value).abs() <= fine + 2.0**-24 * value.abs().double()).all()):
                    broken.append((k, row, "weight"))
                if value.any() and value.abs().max() < scale * 2.0**low:
                    broken.append((k, row, "scale"))
    return broken, [part for p in parameters for part in (p.payload.detach(), p.scale)], held


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("update", "dtype"), PAIRS, ids=str)
def test_steps_by_every_factor_from_2_to_the_minus_40_to_2_to_the_40_are_float32s_to_the_payloads_rounding(
    seed, update, dtype
):
    # Every third factor: an update meets all of them in other payloads, a payload by other updates.
    phase = SCALING.index(update) + [*PAYLOAD_STORE_BY_DTYPE].index(dtype)
    factors = torch.arange(-40.0, 41.0)
    broken, _, _ = walk(update, dtype, factors if samples.IS_WHOLE else factors[phase % 3 :: 3], seed, steps=2)
    assert not broken


@pytest.mark.parametrize(
    ("update", "dtype"), [("stochastic", torch.float8_e4m3fn), ("kahan", torch.float16), ("master", torch.float8_e5m2)]
)
def test_the_compiled_step_walks_the_same_way(seed, update, dtype):
    factors = torch.linspace(-40, 40, 24).round()
    _, *expected = walk(update, dtype, factors, seed)
    _, *found = walk(update, dtype, factors, seed, "llvm")
    assert all(same_bits(a, b) for x, y in zip(expected, found) for a, b in zip(x, y))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [dtype for dtype in PAYLOAD_STORE_BY_DTYPE if dtype != torch.float32])
@pytest.mark.parametrize("update", [name for name in SCALING if name != "exact"])
def test_a_step_that_takes_nearly_all_of_a_weight_away_leaves_the_rest(update, dtype):
    """What is stored does not overflow under the scale that the small rest would have."""
    parameter = torch.nn.Parameter(ScaledTensor.encode(torch.ones(4), dtype))
    optimizer = hu.optim.SGD([parameter], lr=1.0, weight_update=UPDATES[update])
    with engine("reference"):
        for wanted in (1 - 2.0**-20, 0.0):
            parameter.grad = ScaledTensor(torch.full((4,), wanted), 1.0)
            optimizer.step()
    left = parameter.detach().decode()
    assert ((left == 2.0**-20) | (left == 0)).all()
    if dtype.itemsize == 2 and update != "kahan-literal":  # which rounds the update itself
        assert left.all()
