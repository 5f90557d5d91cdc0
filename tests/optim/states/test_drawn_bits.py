"""Which neighbour a stochastic rounding takes, draw by draw, against exact rationals and float64: no chance is off."""

from fractions import Fraction

import pytest
import torch

import halfulp as hu
from halfulp.formats._reference import round_exact
from halfulp.kernels import run_trace_on_tensors
from halfulp.kernels._device_function import ElementTraceBuilder
from halfulp.optim._storage import BF16, E4M3, E5M2, FP16, make_format_store
from halfulp.optim.states._codec import TensorScaleCodec
from halfulp.optim.states._int8_blocks import Int8Blocks
from halfulp.optim.weight_updates._split import SplitStochastic

from ...laws.optim.cases import write_update

# Below which power of two the high bits of a draw decide, by the store.
STORES = {
    "bf16": (BF16, -200),
    "fp16": (FP16, -14),
    "e4m3fn": (E4M3, -6),
    "e5m2": (E5M2, -14),
    **{f"e8m{m} in float32": (make_format_store(f"e8m{m}"), -200) for m in (1, 3, 10)},
    **{f"{name} in float32": (make_format_store(name), 200) for name in ("e4m3fn", "e5m2", "e5m6")},
}


def _spread(store, count):
    """Numbers in the store's range, from far below its smallest up."""
    fmt = hu.formats.get(store.name)
    least, most = max(fmt.emin - fmt.mantissa_bits - 2, -147), min(fmt.emax, 120)
    exponents = torch.randint(least, most, (count,)).double()
    exponents[: count // 3] = float(least) + torch.rand(count // 3).double() * 8
    return ((torch.rand(count).double() - 0.5) * 3 * torch.exp2(exponents)).float()


@pytest.mark.parametrize("name", STORES)
def test_a_store_takes_the_neighbour_that_its_draw_says(seed, name):
    store, border = STORES[name]
    fmt = hu.formats.get(store.name)
    values, random = _spread(store, 600), torch.randint(0, 2**32, (600,))
    lost = 23 - fmt.mantissa_bits
    found = store.decode(store.encode(values, random)).tolist()
    for x, r, got in zip(values.tolist(), random.tolist(), found):
        size = abs(Fraction(x))
        inner, outer = (Fraction(round_exact(float(size), fmt, mode)) for mode in ("down", "up"))
        share = (size - inner) / (outer - inner) if outer > inner else Fraction(0)
        if size < Fraction(2) ** border:
            away = Fraction(r >> 8, 1 << 24) < share
        else:
            drawn = r % 2**lost if store.random_bits == 16 else r >> 32 - lost
            away = share * 2**lost + drawn >= 2**lost
        assert abs(Fraction(got)) == (outer if away else inner), (x, r, got)
        assert got == 0 or (got < 0) == (x < 0)


@pytest.mark.parametrize("store", [FP16, E4M3, E5M2], ids=lambda store: store.name)
def test_a_scaled_root_takes_the_code_that_its_draw_says(seed, store):
    """value^2 is right on average: the upper code where chance (h^2 - l^2) < x^2 - l^2; a positive one is never 0."""
    codec = TensorScaleCodec(store, is_second_moment=True, stochastic=True)
    fmt = hu.formats.get(store.name)
    roots = _spread(store, 600).abs().clamp(min=2.0**-60)
    random = torch.randint(0, 2**32, roots.shape)
    held = [torch.zeros(600, dtype=store.dtype), torch.ones(())]
    codec.encode(held, torch.cat([roots[:-1] ** 2, torch.tensor([fmt.max**2])]), random)
    assert held[1] == 1, "the largest number fits under this scale"
    for value, r, got in zip((roots**2).tolist()[:-1], random.tolist(), held[0].float().tolist()):
        x = float(torch.tensor(value).double().sqrt().float())
        low, high = (round_exact(x, fmt, mode) for mode in ("down", "up"))
        if low == high:
            wanted = {low}
        else:
            chance, share = (r >> 8) * 2.0**-24, (x * x - low * low) / (high * high - low * low)
            # Float32 may decide otherwise where the two are equal but for its rounding.
            wanted = {low, high} if abs(chance - share) < 2.0**-21 else {high if chance < share else low}
        smallest = fmt.smallest_subnormal
        assert got in {max(one, smallest) if x > 0 else one for one in wanted}, (x, r, got)


@pytest.mark.parametrize("squared", [False, True])
def test_an_8_bit_code_is_what_its_draw_says(seed, squared):
    """Cubes around a value, by float64's roots: the upper one where the chance is below the value's place."""
    codec, most, count = Int8Blocks(64, squared), 255 if squared else 127, 64 * 100
    roots = torch.randn(count) * 10.0 ** torch.empty(count).uniform_(-5, 0)
    roots = roots.abs() if squared else roots
    random = torch.randint(0, 2**16, (count,), dtype=torch.int32)
    held = [torch.empty(size, dtype=dtype) for size, dtype in codec.describe_tensors("x", roots.shape).values()]
    element = ElementTraceBuilder(2)
    given = element.add_input("root"), element.add_input("random", "w32")
    codec.store_before_squaring(element.arrays, element.index, element.emit_block_index(), *given)
    run_trace_on_tensors(element.trace, held, {"root": roots, "random": random}, block=64)
    size = roots.double().abs() / held[1].double().repeat_interleave(64) * most**3
    k = (size ** (1 / 3) + 1e-9).floor()
    chance = ((random | 1).double()) * 2.0**-16
    edge = (k + chance) ** 3 if squared else k**3 + chance * ((k + 1) ** 3 - k**3)
    wanted = k + (edge < size)
    wanted = wanted.clamp(min=1) if squared else wanted
    clear = ((edge - size).abs() > 3e-6 * (size + 1)) & ((size ** (1 / 3) - k) > 1e-6)
    assert clear.double().mean() > 0.9
    assert torch.equal(held[0].double().abs()[clear], wanted[clear])
    if not squared:
        assert ((held[0] < 0) == (roots < 0))[clear & (wanted > 0)].all()


def test_a_stochastic_sum_takes_the_float32_that_its_draw_says(seed):
    """Of the two float32 around w + u the farther one, where (draw + 1/2) 2^-16 is below the share of the gap."""
    count = 500
    w = torch.randn(count) * 2.0 ** torch.randint(-10, 10, (count,))
    u = torch.randn(count) * w * 2.0 ** torch.randint(-30, 1, (count,))
    update, random = SplitStochastic(), torch.randint(0, 2**16, (count,))
    parts = [torch.zeros(count, dtype=torch.bfloat16), torch.zeros(count, dtype=torch.int16)]
    update.fill(BF16, parts, w)
    assert torch.equal(update.read(BF16, parts), w)
    write_update(update, BF16, parts, u, [random])
    for a, b, r, got in zip(w.tolist(), u.tolist(), random.tolist(), update.read(BF16, parts).tolist()):
        exact, near = Fraction(a) + Fraction(b), torch.tensor(a) + torch.tensor(b)
        error = exact - Fraction(near.item())
        # The float32 next to the nearest one, on the side of the exact sum.
        toward = torch.tensor(float("inf") if error > 0 else float("-inf"))
        beyond = torch.nextafter(near, toward)
        gap = abs(Fraction(beyond.item()) - Fraction(near.item()))
        takes = Fraction(2 * r + 1, 1 << 17) * gap < abs(error)
        assert got == (beyond if takes else near).item(), (a, b, r)
