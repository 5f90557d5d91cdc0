"""Counts of samples equal those of `quantize` to the element; extremes are those of the whole tensor."""

import math

import pytest
import torch

import halfulp as hu
from halfulp.observation._record import TensorRecord
from halfulp.observation.sampling._sampler import (
    DEFAULT_FORMATS,
    RUN_LENGTH,
    RUNS_PER_SAMPLE,
    SAMPLE_SIZE,
    CandidateFormats,
    TensorTotals,
    _narrow_sample,
    count_samples,
    draw_runs,
    make_place_key,
    measure_extremes,
    read_numbers,
    take_samples,
)

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
SIZES = (0, 1, 2, 127, 129, 4095, 4096, 4097, 5000, 70_001)
ENGINES = ("llvm", "reference")


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


def observed(x: torch.Tensor, engine: str, key: int = 99, formats=DEFAULT_FORMATS) -> tuple[TensorRecord, torch.Tensor]:
    candidates = CandidateFormats(formats)
    found = read_numbers(x)
    totals = TensorTotals(TensorRecord("weight", "w", "", found.dtype), candidates)
    with hu.kernels.engine(engine):
        measure_extremes([found], [totals], candidates, 0)
        sample = take_samples([found], [key]).packed
        count_samples([(sample, totals)], candidates)
    return totals.finish_record(candidates), sample


def expected_counts(sample: torch.Tensor, name: str) -> tuple[int, int, int]:
    """Underflow, subnormal and overflow by quantize alone."""
    format = hu.formats.get(name)
    finite = sample.isfinite()
    size = hu.quantize(sample, format, overflow="nan").abs()
    under = finite & (sample != 0) & (size == 0)
    small = finite & (size > 0) & (size < format.smallest_normal)
    return int(under.sum()), int(small.sum()), int((finite & size.isnan()).sum())


def find_sampled_places(key, elements):
    """Return the sampled positions of a tensor's elements in row-major order; the last run may be shorter than 128."""
    if elements <= SAMPLE_SIZE:
        return torch.arange(elements)
    places = (draw_runs([(key, elements)])[0][:, None] * RUN_LENGTH + torch.arange(RUN_LENGTH)).flatten()
    return places[places < elements]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_formats_of_single_elements(seed, size, dtype, engine):
    x = hard_values(size, dtype)
    record, sample = observed(x, engine)
    assert hu.kernels.same_bits(sample, x[find_sampled_places(99, size)].to(sample.dtype))
    sample = _narrow_sample(sample)
    for name in ("fp16", "bf16", "e5m2", "e4m3fn"):
        found = record.formats[name]
        assert (found.underflow, found.subnormal, found.overflow) == expected_counts(sample, name), name
        assert found.elements == len(sample)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("special", [False, True])
def test_block_formats(seed, size, dtype, engine, special):
    x = hard_values(size, dtype) if special else (torch.randn(size, dtype=torch.float64).exp() ** 4).to(dtype)
    record, sample = observed(x, engine, formats=("mxfp8_e4m3", "nvfp4", "mxfp4", "mxfp6_e3m2"))
    sample = _narrow_sample(sample)
    for name, found in record.formats.items():
        format = hu.formats.get_block(name)
        padding = -len(sample) % format.block
        rounded = hu.quantize(sample, name)
        blocks, values = (torch.nn.functional.pad(t, (0, padding)).view(-1, format.block) for t in (sample, rounded))
        finite = blocks.isfinite().all(1, keepdim=True)
        gone = finite & (blocks != 0) & (values == 0)
        assert found.underflow == int(gone.sum()), name
        assert found.elements == int(finite.expand_as(blocks).flatten()[: len(sample)].sum())
        hidden = gone & (values.abs().amax(1, keepdim=True) > 0)
        assert record.block_hidden[name] == int(hidden.sum())
        assert found.overflow == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_engines_agree_on_everything(seed, dtype):
    for size in SIZES:
        x = hard_values(size, dtype)
        fast, slow = observed(x, "llvm")[0], observed(x, "reference")[0]
        fast.rms = slow.rms = 0.0  # a sum in another order
        assert fast == slow


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_extremes_are_of_the_whole_tensor(seed, dtype, engine):
    x = hard_values(70_001, dtype)
    record, _ = observed(x, engine)
    finite = x[x.isfinite()].double().abs()
    assert record.elements == 70_001
    assert record.zeros == int((x == 0).sum())
    assert record.nonfinite == 70_001 - len(finite)
    assert record.largest == int((x.abs() == torch.finfo(dtype).max).sum())
    assert record.amax == record.last_amax == float(finite.max())
    assert record.amin == float(finite[finite > 0].min())


def test_histogram_counts_binades(seed):
    x = hard_values(4096, torch.float32)
    record, sample = observed(x, "llvm")
    known = sample[sample.isfinite() & (sample != 0)].double()
    binades, counts = (torch.frexp(known)[1] - 1).unique(return_counts=True)
    assert record.histogram == dict(zip(binades.tolist(), counts.tolist()))


def test_eight_bit_payloads_are_counted_at_their_own_largest_number():
    x = torch.tensor([448.0, 1.0, 0.0, -448.0]).to(torch.float8_e4m3fn)
    record, _ = observed(x, "llvm")
    assert (record.dtype, record.largest, record.zeros, record.amax) == (torch.float8_e4m3fn, 2, 1, 448.0)


@pytest.mark.parametrize("engine", ENGINES)
def test_views_are_taken_in_row_major_order(seed, engine):
    base = torch.randn(96, 80)
    for x in (base.T, base[::2, 1:], base[:1].expand(70, 80), base.T.contiguous().T, base[3, 4], base[:0]):
        fast, sample = observed(x, engine)
        again, same = observed(x.clone(memory_format=torch.contiguous_format), engine)
        assert fast == again
        assert torch.equal(sample, same)


def test_scaled_and_multicomponent_tensors():
    x = torch.tensor([[1.0, 2.0], [3.0, 0.0]])
    scaled = read_numbers(hu.ScaledTensor.encode(x, dtype=torch.float16, scale=0.25))
    assert (scaled.dtype, scaled.scale) == (torch.float16, 0.25)
    assert torch.equal(scaled.flat.float() * scaled.scale, x)
    expansion = read_numbers(hu.MCTensor.encode(x, components=2, dtype=torch.bfloat16))
    assert expansion.dtype == torch.bfloat16
    assert torch.equal(expansion.flat.float(), x)


def test_what_has_no_numbers_is_none():
    for x in (
        torch.arange(3),
        torch.empty(3, device="meta"),
        torch.eye(3).to_sparse(),
        torch.zeros(2, dtype=torch.cfloat),
    ):
        assert read_numbers(x) is None


def test_places_are_aligned_runs_and_depend_on_step_and_name():
    keys = [make_place_key(0, "a"), make_place_key(1, "a"), make_place_key(0, "b")]
    places = [find_sampled_places(key, 10**6) for key in keys]
    for k, one in enumerate(places):
        assert len(one) == SAMPLE_SIZE
        assert (one.view(-1, RUN_LENGTH)[:, 0] % RUN_LENGTH == 0).all()
        assert not any(torch.equal(one, other) for other in places[:k])
    assert torch.equal(places[0], find_sampled_places(keys[0], 10**6))


@pytest.mark.parametrize("elements", [4097, 5000, 40_960])
def test_every_run_has_the_same_chance(elements):
    runs, trials = -(-elements // RUN_LENGTH), 3000
    starts = [
        start for step in range(trials) for start in draw_runs([(make_place_key(step, "w"), elements)])[0].tolist()
    ]
    counts = torch.bincount(torch.tensor(starts), minlength=runs)
    expected = trials * 32 / runs
    # Six standard deviations of a binomial count, at about one in a hundred million for each run.
    assert float((counts - expected).abs().max()) < 6 * math.sqrt(expected) + 1


def test_shares_of_the_sample_are_those_of_the_tensor_within_the_stated_error(seed):
    x = torch.randn(400, 500) * 10.0 ** torch.linspace(-9, 1, 400)[:, None]
    whole = int((hu.quantize(x, "fp16") == 0).sum()) / x.numel()
    steps, found = 25, []
    for step in range(steps):
        record, _ = observed(x, "llvm", key=make_place_key(step, "w"))
        found.append(record.formats["fp16"].underflow / record.sampled)
    error = math.sqrt(
        whole * (1 - whole) / (RUNS_PER_SAMPLE * steps)
    )  # of runs whose elements are copies of each other
    assert abs(sum(found) / steps - whole) < 5 * error


def test_formats_that_do_not_fit_are_refused():
    odd = hu.BlockFormat("odd", hu.formats.e2m1fn, hu.formats.e8m0, 48)
    with pytest.raises(ValueError, match="blocks of 48 elements"):
        CandidateFormats([odd])
    with pytest.raises(ValueError, match="unknown format"):
        CandidateFormats(["fp17"])
