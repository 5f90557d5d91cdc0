"""Casts to eight bits on either way, and layers that multiply them."""

import gfloat
import gfloat.formats
import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from halfulp.scaled import ScaledTensor, cast, eight_bit_engine, linear_fp8
from halfulp.scaled.rules import _products
from halfulp.subclass import strict

COMPILED = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_FORMATS = {E4M3: ml_dtypes.float8_e4m3fn, E5M2: ml_dtypes.float8_e5m2}


def _near_rms(values: np.ndarray) -> float:
    """The power of two next to the root mean square of what is not 0, by float64 arithmetic."""
    values = values[values != 0].astype(np.float64)
    return 2.0 ** round(float(np.log2(np.sqrt(np.mean(values**2)))))


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_values_are_rounded_under_the_power_of_two_of_their_rms(dtype, seed):
    x = torch.randn(1000) * 3e-5
    x[::7] = 0
    power = _near_rms(x.numpy())
    wanted = torch.from_numpy((x.numpy() / power).astype(_FORMATS[dtype]).astype(np.float32) * np.float32(power))
    assert torch.equal(cast(x, forward=dtype), wanted)
    y = cast(ScaledTensor.encode(x, torch.float32), forward=dtype)
    assert y.payload.dtype == dtype
    assert y.scale.item() == power
    assert torch.equal(y.decode(), wanted)


def test_a_cast_does_not_depend_on_the_scale(seed):
    x = torch.randn(50)
    wanted = cast(ScaledTensor(x, 1.0), forward=E4M3)
    for exponent in (-60, -3, 60):
        y = cast(ScaledTensor(x * 2.0**-exponent, 2.0**exponent), forward=E4M3)
        assert torch.equal(y.decode(), wanted.decode())
        assert torch.equal(y.scale, wanted.scale)


def test_large_elements_are_kept_and_infinities_stay():
    x = torch.full((4096,), 0.5)
    x[0] = 60000.0
    assert cast(x, forward=E4M3)[0].item() == pytest.approx(60000, rel=0.07)
    y = cast(ScaledTensor.encode(torch.tensor([1.0, float("inf"), float("nan"), -1.0])), forward=E5M2)
    assert str(y.tolist()) == "[1.0, inf, nan, -1.0]"


@pytest.mark.parametrize("shape", [(3,), (0,), ()])
def test_zeros_and_empty_tensors(shape):
    for x in (
        torch.zeros(shape),
        ScaledTensor.encode(torch.zeros(shape)),
        torch.zeros_like(ScaledTensor(torch.ones(shape), 1.0)),
    ):
        y = cast(x, forward=E4M3, backward=E5M2)
        assert y.shape == shape
        assert not y.any()


@COMPILED
@pytest.mark.parametrize("scaled", [False, True])
def test_a_cast_acts_the_same_with_and_without_gradients_and_compiled(scaled, seed):
    start = torch.randn(32, 8)
    x = ScaledTensor.encode(start) if scaled else start
    weight = ScaledTensor.encode(torch.eye(8) * 2) if scaled else torch.eye(8) * 2  # the result's payload is float16
    step = lambda x: cast(x, forward=E4M3, backward=E5M2) @ weight  # noqa: E731
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        plain = step(x)
    results = []
    for run in (step, compiled):
        leaf = x.detach().clone().requires_grad_()
        y = run(leaf)
        y.backward(ScaledTensor.encode(start * 1e-5) if scaled else start * 1e-5)
        results.append((_value(y), _value(leaf.grad)))
    (y, gradient), (compiled_y, compiled_gradient) = results
    assert torch.equal(y, _value(plain))
    assert torch.equal(y, compiled_y)
    assert torch.equal(gradient, compiled_gradient)
    assert torch.equal(y, _value(step(x)))
    assert y.ne(_value(x) * 2).any()
    if scaled:
        assert leaf.grad.payload.dtype == E5M2
        assert cast(x, forward=E4M3).payload.dtype == E4M3
    given = _value(ScaledTensor.encode(start * 1e-5)) * 2 if scaled else start * 1e-5 * 2
    power = np.float32(_near_rms(given.numpy()))
    assert torch.equal(
        gradient, torch.from_numpy((given.numpy() / power).astype(_FORMATS[E5M2]).astype(np.float32) * power)
    )


def _value(x: Tensor) -> Tensor:
    return x.detach().decode() if isinstance(x, ScaledTensor) else x.detach()


def test_one_side_alone(seed):
    x = ScaledTensor.encode(torch.randn(6)).requires_grad_()
    y = cast(x, backward=E5M2)
    assert torch.equal(y.payload, x.payload)
    assert y.payload.dtype == torch.float16
    y.sum().backward()
    assert x.grad.payload.dtype == E5M2
    x.grad = None
    cast(x, forward=E4M3).sum().backward()
    assert x.grad.payload.dtype != E5M2
    assert x.grad.tolist() == [1.0] * 6
    assert cast(x) is x


def test_a_linear_layer_rounds_operands_to_e4m3_and_gradients_to_e5m2(seed):
    x, weight, bias = torch.randn(4, 6, 32) * 1e-4, torch.randn(16, 32) * 20, torch.randn(16) * 1e-3
    tensors = [ScaledTensor.encode(t, torch.float32).requires_grad_() for t in (x, weight, bias)]
    gradient = torch.randn(4, 6, 16) * 1e-6
    with strict():
        y = linear_fp8(*tensors)
        y.backward(ScaledTensor.encode(gradient, torch.float32))
    x8, w8 = (_rounded(t, E4M3) for t in (x, weight))
    g8 = _rounded(gradient, E5M2)
    pairs = [
        (y, x8 @ w8.T + bias.double()),
        (tensors[0].grad, g8 @ w8),
        (tensors[1].grad, g8.reshape(-1, 16).T @ x8.reshape(-1, 32)),
        (tensors[2].grad, gradient.double().sum((0, 1))),
    ]
    for found, wanted in pairs:
        # Two roundings to float16: of the product, and of the sum with the bias.
        assert (_value(found).double() - wanted).abs().max() <= wanted.abs().max() * 2**-10
    assert tensors[1].grad.payload.dtype == torch.float16


def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """By gfloat, in float64."""
    info = {E4M3: gfloat.formats.format_info_ocp_e4m3, E5M2: gfloat.formats.format_info_ocp_e5m2}[dtype]
    power = _near_rms(x.numpy().ravel())
    return torch.from_numpy(gfloat.round_ndarray(info, x.double().numpy() / power) * power)


def test_a_linear_layer_of_plain_tensors_is_rounded_too(seed):
    x, weight = torch.randn(5, 32).requires_grad_(), torch.randn(7, 32).requires_grad_()
    y = linear_fp8(x, weight)
    assert torch.allclose(y.double(), _rounded(x.detach(), E4M3) @ _rounded(weight.detach(), E4M3).T, atol=1e-5)
    y.sum().backward()
    assert torch.allclose(x.grad.double(), _rounded(weight.detach(), E4M3).sum(0).expand(5, 32), atol=1e-5)


@COMPILED
def test_one_graph_gives_the_same_bits(seed):
    tensors = [ScaledTensor.encode(torch.randn(s)) for s in ((3, 4, 32), (16, 32))]
    results = []
    for run in (linear_fp8, torch.compile(linear_fp8, fullgraph=True)):
        x, weight = (t.detach().clone().requires_grad_() for t in tensors)
        y = run(x, weight)
        y.sum().backward()
        results.append([_value(t) for t in (y, x.grad, weight.grad)])
    assert all(map(torch.equal, *results))


def test_engines_give_the_same_products(monkeypatch, seed, needs_torch):
    needs_torch("torch._scaled_mm on the CPU")
    assert eight_bit_engine("cpu") == "emulated" == eight_bit_engine(torch.device("cpu"))
    a = ScaledTensor.encode(torch.randn(32, 64), E5M2)
    b = ScaledTensor.encode(torch.randn(48, 64), E4M3)
    emulated = [a @ b.t(), b @ a.t(), a.t()[:, :16] @ a[:16]]
    monkeypatch.setattr(_products, "eight_bit_engine", lambda device: "scaled_mm")
    calls = []
    product = torch._scaled_mm
    monkeypatch.setattr(torch, "_scaled_mm", lambda *given, **options: calls.append(1) or product(*given, **options))
    native = [a @ b.t(), b @ a.t(), a.t()[:, :16] @ a[:16]]
    assert len(calls) == 2  # two e5m2 operands are none of its pairs
    for x, y in zip(emulated, native):
        assert x.payload.dtype == torch.float16 == y.payload.dtype
        assert torch.equal(x.scale, y.scale)
        assert (x.decode() - y.decode()).abs().max() <= x.decode().abs().max() * 2**-11
    assert not torch.equal((a[:5] @ b.t()).decode(), torch.zeros(5, 48))
    assert len(calls) == 2


def test_what_cannot_be_cast_is_refused():
    with pytest.raises(TypeError, match=r"a torch\.Tensor"):
        cast(1.0, forward=E4M3)
    with pytest.raises(ValueError, match="floating"):
        cast(torch.arange(3), forward=E4M3)
    with pytest.raises(ValueError, match="payload is one of"):
        cast(torch.ones(3), backward=torch.float64)


def test_a_small_network_trains_as_in_float32(seed):
    x = torch.randn(256, 16)
    wanted = torch.tanh(x @ torch.randn(16, 4) / 4)
    start = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))

    def train(eight: bool) -> float:
        make = lambda t: ScaledTensor.encode(t.detach(), torch.float32) if eight else t.detach().clone()  # noqa: E731
        layers = [[make(t).requires_grad_() for t in (start[i].weight, start[i].bias)] for i in (0, 2)]
        linear = linear_fp8 if eight else functional.linear
        given, target = (make(x), make(wanted)) if eight else (x, wanted)
        for _ in range(150):
            y = linear(functional.relu(linear(given, *layers[0])), *layers[1])
            loss = ((y - target) * (y - target)).mean()
            gradients = torch.autograd.grad(loss, [t for layer in layers for t in layer])
            with torch.no_grad():
                for t, gradient in zip([t for layer in layers for t in layer], gradients):
                    t.sub_(gradient * 0.5)
        return loss.item()

    assert train(True) < 1.3 * train(False) + 1e-3


@pytest.mark.parametrize("storage", [E4M3, E5M2, torch.float16, torch.float32])
def test_a_compiled_backward_takes_gradients_of_any_storage(storage, seed):
    x = ScaledTensor.encode(torch.randn(64)).requires_grad_()
    gradient = ScaledTensor.encode(torch.randn(64) * 1e-5, storage)
    torch.compile(lambda x: x * 2.0, fullgraph=True, backend="aot_eager")(x).backward(gradient)
    assert (x.grad.decode() - gradient.decode() * 2).norm() <= 1e-3 * gradient.decode().norm()
