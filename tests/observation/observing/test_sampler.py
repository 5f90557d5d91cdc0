"""Extremes are those of the whole tensor, samples lie where a counter says, and histograms have each sampled number."""

import math

import pytest
import torch

import halfulp as hu
from halfulp.observation._record import TensorRecord
from halfulp.observation.findings._ranges import estimate_vanished_share
from halfulp.observation.observing._sampler import (
    RUNS_PER_SAMPLE,
    SAMPLE_SIZE,
    SAMPLED_RUN_LENGTH,
    add_sample_to_histogram,
    draw_sampled_run_indices,
    make_sampling_key,
    read_numbers,
    record_amax_and_count_nonfinite,
    take_sample,
)

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
SIZES = (0, 1, 2, 127, 129, 4095, 4096, 4097, 5000, 70_001)


def hard_values(count: int, dtype: torch.dtype) -> torch.Tensor:
    """Random numbers over the whole range, with zeros of both signs, subnormals, limits, infinities and NaN."""
    wide = torch.randn(count, dtype=torch.float64) * 2.0 ** (torch.rand(count, dtype=torch.float64) * 100 - 50)
    x = wide.to(dtype)
    info = torch.finfo(dtype)
    special = [0.0, -0.0, info.max, -info.max, info.tiny, info.smallest_normal / 2, math.inf, -math.inf, math.nan]
    for value in special:
        if count > 3:
            x[torch.randint(count, (max(1, count // 300),))] = value
    return x


def observed(x: torch.Tensor, key: int = 99) -> tuple[TensorRecord, torch.Tensor]:
    found = read_numbers(x)
    record = TensorRecord("weight", "w", "", found.dtype)
    record_amax_and_count_nonfinite(found, record)
    sample = take_sample(found.values, key)
    add_sample_to_histogram(sample, record)
    return record, sample


def find_sampled_places(key, elements):
    """Return the sampled positions of a tensor's elements in row-major order; the last run may be shorter than 128."""
    if elements <= SAMPLE_SIZE:
        return torch.arange(elements)
    places = (
        draw_sampled_run_indices(key, elements)[:, None] * SAMPLED_RUN_LENGTH + torch.arange(SAMPLED_RUN_LENGTH)
    ).flatten()
    return places[places < elements]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_samples_and_their_histograms(seed, size, dtype):
    x = hard_values(size, dtype)
    record, sample = observed(x)
    assert hu.kernels.same_bits(sample, x[find_sampled_places(99, size)].to(sample.dtype))
    finite = sample[sample.isfinite()]
    counts: dict[int, int] = {}
    for value in finite[finite != 0].tolist():
        exponent = max(-1023, math.frexp(value)[1] - 1)  # of float64's subnormal numbers
        counts[exponent] = counts.get(exponent, 0) + 1
    assert record.sampled == len(sample)
    assert record.histogram == counts
    with_all = finite.square().mean().sqrt() if len(finite) else 0.0
    assert record.rms == pytest.approx(float(with_all), rel=1e-12)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_extremes_are_those_of_the_whole_tensor(seed, size, dtype):
    x = hard_values(size, dtype)
    record, _ = observed(x)
    finite = x[x.isfinite()].abs().double()
    assert (record.elements, record.nonfinite) == (size, size - len(finite))
    assert record.largest == int((x.abs() == torch.finfo(dtype).max).sum())
    assert record.amax == record.last_amax == (float(finite.max()) if len(finite) else 0.0)
    assert record.is_zero_in_all_steps == (size > 0 and not x.ne(0).any())


def test_subnormal_numbers_are_counted_by_their_powers_where_the_thread_flushes_them():
    x = torch.tensor([2.0**-133, 2.0**-133, -(2.0**-130), 0.0], dtype=torch.bfloat16)
    was_flushing = hu.kernels._threads.flushes_subnormals()
    torch.set_flush_denormal(True)
    try:
        record, _ = observed(x)
    finally:
        torch.set_flush_denormal(was_flushing)
    assert record.histogram == {-133: 2, -130: 1}
    assert estimate_vanished_share(record, hu.formats.get("bf16")) == 0.25


def test_float8_is_read_as_it_is():
    x = torch.tensor([448.0, -448.0, 0.0, 2.0]).to(torch.float8_e4m3fn)
    record, _ = observed(x)
    assert (record.dtype, record.largest, record.amax) == (torch.float8_e4m3fn, 2, 448.0)


def test_views_are_taken_in_row_major_order(seed):
    base = torch.randn(96, 80)
    for x in (base.T, base[::2, 1:], base[:1].expand(70, 80), base.T.contiguous().T, base[3, 4], base[:0]):
        fast, sample = observed(x)
        again, same = observed(x.clone(memory_format=torch.contiguous_format))
        assert fast == again
        assert torch.equal(sample, same)


def test_scaled_and_multicomponent_tensors():
    x = torch.tensor([[1.0, 2.0], [3.0, 0.0]])
    scaled = read_numbers(hu.ScaledTensor.encode(x, dtype=torch.float16, scale=0.25))
    assert (scaled.dtype, scaled.scale) == (torch.float16, 0.25)
    assert torch.equal(scaled.values.float() * scaled.scale, x)
    expansion = read_numbers(hu.MCTensor.encode(x, components=2, dtype=torch.bfloat16))
    assert expansion.dtype == torch.bfloat16
    assert torch.equal(expansion.values.float(), x)


def test_what_has_no_numbers_is_none():
    for x in (
        torch.arange(3),
        torch.empty(3, device="meta"),
        torch.eye(3).to_sparse(),
        torch.zeros(2, dtype=torch.cfloat),
    ):
        assert read_numbers(x) is None


def test_places_are_aligned_runs_and_depend_on_step_and_name():
    keys = [make_sampling_key(0, "a"), make_sampling_key(1, "a"), make_sampling_key(0, "b")]
    places = [find_sampled_places(key, 10**6) for key in keys]
    for k, one in enumerate(places):
        assert len(one) == SAMPLE_SIZE
        assert (one.view(-1, SAMPLED_RUN_LENGTH)[:, 0] % SAMPLED_RUN_LENGTH == 0).all()
        assert not any(torch.equal(one, other) for other in places[:k])
    assert torch.equal(places[0], find_sampled_places(keys[0], 10**6))


@pytest.mark.parametrize("elements", [4097, 5000, 40_960])
def test_every_run_has_the_same_chance(elements):
    runs, trials = -(-elements // SAMPLED_RUN_LENGTH), 3000
    starts = [
        start
        for step in range(trials)
        for start in draw_sampled_run_indices(make_sampling_key(step, "w"), elements).tolist()
    ]
    counts = torch.bincount(torch.tensor(starts), minlength=runs)
    expected = trials * 32 / runs
    # Six standard deviations of a binomial count, at about one in a hundred million for each run.
    assert float((counts - expected).abs().max()) < 6 * math.sqrt(expected) + 1


def test_shares_of_the_sample_are_those_of_the_tensor_within_the_stated_error(seed):
    x = torch.randn(400, 500) * 10.0 ** torch.linspace(-9, 1, 400)[:, None]
    whole = int((x.abs() < 2.0**-25).sum()) / x.numel()
    steps, found = 25, []
    for step in range(steps):
        record, _ = observed(x, key=make_sampling_key(step, "w"))
        found.append(sum(many for power, many in record.histogram.items() if power < -25) / record.sampled)
    # Of runs whose elements are copies of each other.
    error = math.sqrt(whole * (1 - whole) / (RUNS_PER_SAMPLE * steps))
    assert abs(sum(found) / steps - whole) < 5 * error
