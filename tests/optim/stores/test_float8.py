"""8-bit stores: every code decodes to its number, encoding rounds as torch does, on numbers and on tensors."""

import numpy as np
import pytest
import torch

from halfulp.kernels import same_bits
from halfulp.optim._storage import E4M3, E5M2

from ...kernels.scalar.numbers import on_numbers
from ...laws.optim.cases import SPECIAL

STORES = {"e4m3fn": E4M3, "e5m2": E5M2}


def _values(store):
    spread = torch.randn(3000) * 2.0 ** torch.empty(3000).uniform_(-25, 12)
    words = torch.randint(-(2**31), 2**31, (1000,)).to(torch.int32).view(torch.float32)
    return torch.cat([_every_code(store).float(), torch.tensor(SPECIAL), spread, words])


def _every_code(store):
    return torch.arange(256).to(torch.uint8).view(store.dtype)


def _picked(codes, mask):
    # torch 2.6 cannot index eight-bit floats.
    return codes.view(torch.uint8)[mask].view(codes.dtype)


@pytest.mark.parametrize("name", STORES)
def test_every_code_decodes_and_encodes_back(name):
    store = STORES[name]
    codes = _every_code(store)
    real = store.decode(codes)
    assert same_bits(real, codes.float())
    assert same_bits(real, torch.from_numpy(on_numbers(store.decode_code, np.arange(256, dtype=np.uint32)).copy()))
    for random in (None, torch.full(codes.shape, 2**32 - 1)):
        again = store.encode(real, random)
        assert same_bits(_picked(again, ~real.isinf()), _picked(codes, ~real.isinf()))


@pytest.mark.parametrize("name", STORES)
def test_nearest_is_torchs_and_infinities_do_not_become_numbers(seed, name, needs_torch):
    store = STORES[name]
    if name == "e4m3fn":
        needs_torch("a cast to float8_e4m3fn that saturates")
    values = _values(store)
    finite, encoded = values.isfinite(), store.encode(values, None)
    assert same_bits(_picked(encoded, finite), _picked(values.to(store.dtype), finite))
    assert not encoded.float()[~finite].isfinite().any()


@pytest.mark.parametrize("name", STORES)
def test_the_pieces_on_numbers_are_those_on_tensors(seed, name):
    store = STORES[name]
    values = _values(store)
    random = torch.randint(0, 2**32, values.shape)
    wanted = [store.encode(values, given).view(torch.uint8).tolist() for given in (None, random)]
    words = random.numpy().astype(np.uint32)
    assert on_numbers(store.round_to_nearest, values.numpy(), words).tolist() == wanted[0]
    assert on_numbers(store.round_stochastically, values.numpy(), words).tolist() == wanted[1]


@pytest.mark.parametrize("name", STORES)
def test_stochastic_takes_a_neighbour_with_the_chance_of_its_nearness(seed, name):
    store, n = STORES[name], 40_000
    tiny = torch.finfo(store.dtype).smallest_normal / (8 if name == "e4m3fn" else 4)
    for low, high in ((1.0, 1.0 + torch.finfo(store.dtype).eps), (2 * tiny, 3 * tiny)):
        spot = low + 0.3 * (high - low)
        got = store.decode(store.encode(torch.full((n,), spot), torch.randint(0, 2**32, (n,))))
        assert ((got == low) | (got == high)).all()
        assert abs((got == high).double().mean().item() - 0.3) < 6 * (0.21 / n) ** 0.5
