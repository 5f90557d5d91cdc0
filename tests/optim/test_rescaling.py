"""A scale that changes in a step changes no weight: payload and companions are rescaled as one number."""

import itertools

import pytest
import torch

import halfulp as hu
from halfulp.kernels import engine
from halfulp.optim._eight_bits import PAYLOADS
from halfulp.scaled import ScaledTensor

from .laws import UPDATES

SCALING = [name for name, update in UPDATES.items() if update.scales]


def _goes(update, dtype):
    try:
        UPDATES[update].check(PAYLOADS[dtype])
    except ValueError:
        return False
    return True


def _accompanied(update, store):
    """Parts with live companions, of all sizes down to subnormals."""
    value = torch.randn(400) * 2.0 ** torch.linspace(store.emin - 4, 6, 400).round()
    names = update.companions(store)
    parts = [torch.zeros(400, dtype=dtype) for dtype in (store.dtype, *(dtype for _, dtype in names))]
    update.fill(store, parts, value)
    for _ in range(3):
        draws = [torch.randint(2**bits, (400,)) for bits in update.draws(store)]
        update.write(store, parts, torch.randn(400) * value * 2.0 ** -(store.mantissa_bits + 3), draws)
    return parts


def _value(update, store, parts):
    """Payload plus companion in float64, as the equations of the updates say; a master is the value."""
    if update.name == "master":
        return parts[1].double()
    return sum(part.double() for part in parts)


@pytest.mark.parametrize(
    ("update", "dtype"), [pair for pair in itertools.product(SCALING, PAYLOADS) if _goes(*pair)], ids=str
)
def test_payload_plus_companion_is_invariant_under_powers_of_two(seed, update, dtype):
    update, store = UPDATES[update], PAYLOADS[dtype]
    least = 2.0**-149 if update.name == "master" else 2.0 ** (store.emin - store.mantissa_bits)
    start = _accompanied(update, store)
    for exponent in (-20, -7, -3, -1, 0, 1):
        parts = [part.clone() for part in start]
        wanted = _value(update, store, parts) * 2.0**exponent
        update.multiply(store, parts, 2.0**exponent)
        error = (_value(update, store, parts) - wanted).abs()
        fits = wanted % least == 0
        assert not error[fits].any()
        assert (error <= least / 2).all()
        assert torch.equal(update.read(store, parts), _value(update, store, parts).float()), "judged another's"


def test_infinite_and_nan_payloads_stay_so_and_get_no_companion(seed):
    for name, dtype in itertools.product(SCALING, (torch.float16, torch.bfloat16)):
        update, store = UPDATES[name], PAYLOADS[dtype]
        if _goes(name, dtype):
            parts = _accompanied(update, store)
            parts[0][:3] = torch.tensor([torch.inf, -torch.inf, torch.nan])
            update.multiply(store, parts, 0.5)
            assert parts[0][:2].tolist() == [torch.inf, -torch.inf]
            assert update.read(store, parts)[:2].tolist() == [torch.inf, -torch.inf]
            assert update.read(store, parts)[2].isnan()


@pytest.mark.parametrize("dtype", [dtype for dtype in PAYLOADS if dtype != torch.float32])
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
