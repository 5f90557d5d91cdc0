"""Into scaled tensors: assigning to x.data, and values beyond every scale."""

import math

import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import halfulp as hu
from halfulp.kernels import same_bits
from halfulp.rounding import quantize
from halfulp.scaled import ScaledTensor, cast, scalify
from halfulp.scaled._scaled_tensor import measure_rms_scale

STORAGES = [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float32]


@pytest.mark.parametrize("storage", STORAGES, ids=str)
@pytest.mark.parametrize("logical", [torch.float32, torch.bfloat16])
def test_data_takes_a_plain_tensor(storage, logical, seed):
    x = nn.Parameter(ScaledTensor.encode(torch.randn(2, 3).to(logical), storage))
    value = 1e-9 * torch.randn(4, 5)
    x.data = value
    wanted = ScaledTensor.encode(value, storage)
    assert isinstance(x, nn.Parameter)
    assert x.requires_grad
    assert (x.shape, x.dtype, x.payload.dtype) == ((4, 5), logical, storage)
    assert torch.equal(x.payload.float(), wanted.payload.float())
    assert torch.equal(x.scale, wanted.scale)
    value.zero_()
    assert torch.equal(x.payload.float(), wanted.payload.float())


def test_data_refuses_what_carries_no_scale(seed):
    x = ScaledTensor.encode(torch.ones(2))
    for wrong, error, message in (
        (torch.ones(2, dtype=torch.int64), ValueError, "integers carry no scale"),
        (torch.ones(2).to_sparse(), ValueError, "to_dense"),
        ([1.0, 2.0], TypeError, "or a plain one, got list"),
        (hu.MCTensor.encode(torch.ones(2)), TypeError, "or a plain one, got MCTensor"),
    ):
        with pytest.raises(error, match=message):
            x.data = wrong
    assert x.tolist() == [1.0, 1.0]


def test_a_vector_goes_into_the_parameters(seed):
    model = hu.scalify(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)))
    vector = torch.randn(parameters_to_vector(model.parameters()).numel()).half().float()
    vector_to_parameters(vector, model.parameters())
    assert all(isinstance(p, ScaledTensor) for p in model.parameters())
    assert torch.equal(torch.cat([p.decode().flatten() for p in model.parameters()]), vector)
    model(torch.randn(2, 3)).sum().backward()


def test_transformers_resizes_scaled_embeddings(seed):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=11, n_positions=8)
    model = hu.scalify(transformers.GPT2LMHeadModel(config).eval())
    start = model.transformer.wte.weight.detach().decode()
    model.resize_token_embeddings(13, mean_resizing=False)
    weight = model.transformer.wte.weight
    assert weight.shape == (13, 8)
    assert isinstance(weight, ScaledTensor)
    torch.testing.assert_close(weight.detach().decode()[:11], start, rtol=2**-10, atol=1e-6)
    model(torch.tensor([[1, 12]]), labels=torch.tensor([[1, 12]])).loss.backward()


@pytest.mark.parametrize("storage", [torch.float16, torch.float8_e5m2, torch.float32], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("count", [1, 2, 3, 40])
def test_a_measured_scale_is_next_to_the_root_mean_square_of_what_is_not_zero(count, dtype, storage, seed):
    for _ in range(20):
        values = torch.zeros(count + 5, dtype=dtype)
        values[torch.randperm(count + 5)[:count]] = torch.rand(count, dtype=dtype) + 1
        rms = math.sqrt(values.double().square().sum().item() / count)
        found = measure_rms_scale(values, storage).item()
        assert math.log2(found) in (math.floor(math.log2(rms)), math.ceil(math.log2(rms)))
        assert abs(math.log2(found / rms)) <= 0.5 + 1e-6


def test_beyond_every_scale(seed):
    for dtype, size in ((torch.float16, 1e300), (torch.float8_e4m3fn, 1e42), (torch.float32, 1e200)):
        with pytest.raises(ValueError, match=r"out of torch\.float.*: it is beyond what any scale holds"):
            ScaledTensor.encode(torch.tensor([size], dtype=torch.float64), dtype)
        with pytest.raises(ValueError, match="beyond what any scale holds"):
            ScaledTensor.encode(torch.tensor([size], dtype=torch.float64), dtype, scale=1.0)
    largest = torch.tensor([65504 * 2.0**127], dtype=torch.float64)
    assert ScaledTensor.encode(largest).decode(torch.float64).item() == largest.item()


@pytest.mark.parametrize(
    "operation",
    [
        lambda x, s: s @ x,
        lambda x, s: x @ s,
        lambda x, s: x + s,
    ],
)
def test_sparse_operands_are_refused_by_name(operation, seed):
    x, sparse = ScaledTensor.encode(torch.randn(3, 3)), torch.eye(3).to_sparse()
    with pytest.raises(NotImplementedError, match=r"aten.*decode\(\)"):
        operation(x, sparse)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning", "ignore::halfulp.subclass.FallbackWarning")
@pytest.mark.parametrize("kind", ["model", "function"])
def test_forward_mode_derivatives_pass_from_plain_to_scaled(kind, seed):
    plain = torch.nn.Linear(3, 2)
    x, tangent = torch.randn(4, 3), torch.randn(4, 3)
    weight = plain.weight.detach()
    function = (lambda v: v @ weight.t()) if kind == "function" else plain
    wanted = torch.func.jvp(function, (x,), (tangent,))[1]
    scaled = scalify(function, torch.float32)
    found = torch.func.jvp(scaled, (x,), (tangent,))[1]
    found = found.decode() if isinstance(found, ScaledTensor) else found
    torch.testing.assert_close(found.detach(), wanted.detach())


@pytest.mark.parametrize("storage", [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_float64_is_rounded_once(storage, seed):
    """Beside a tie by less than float32 shows, rounding to float32 first would go to the even neighbour."""
    near = torch.randn(2000, dtype=torch.float64).to(storage).double()
    ulp = torch.exp2(torch.frexp(near).exponent.double() - 1) * torch.finfo(storage).eps
    x = (
        near
        + ulp / 2
        + ulp * torch.exp2(-torch.randint(20, 36, near.shape).double()) * torch.randint(-1, 2, near.shape)
    )
    x = torch.cat([x, -x, torch.tensor([0.0, -0.0, torch.nan])])

    def once(values):
        return quantize(values, storage, overflow="saturate")

    encoded = ScaledTensor.encode(x, storage)
    assert same_bits(encoded.payload.double(), once(x / encoded.scale.double()))
    assert same_bits(cast(x, forward=storage), _unscaled_once(x, storage, once))
    scale = torch.tensor(2.0**-3)
    given = ScaledTensor.encode(x, storage, scale=scale)
    assert same_bits(given.payload.double(), once(x * 8))


def _unscaled_once(x, storage, once):
    scale = measure_rms_scale(x.to(torch.float32), storage).double()
    return once(x / scale) * scale
