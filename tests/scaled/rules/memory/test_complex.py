"""Complex results are plain values, and real ones of complex numbers stay plain."""

import pytest
import torch

from halfulp.scaled import ScaledTensor
from halfulp.testing import check_rule


@pytest.mark.parametrize(
    "operator",
    [
        torch.fft.rfft,
        torch.fft.fft2,
        lambda x: torch.fft.irfft(torch.fft.rfft(x)),
        lambda x: torch.view_as_complex(x.reshape(3, 2, 2)),
        lambda x: torch.complex(x, 2 * x),
        lambda x: torch.polar(x.abs(), x),
        lambda x: torch.fft.rfft(x).abs(),
    ],
)
def test_values_and_gradients(seed, operator):
    check_rule(operator, lambda: (torch.randn(3, 4),), seed=seed, trials=3, exact=1e-5)


def test_results_are_plain_and_gradients_arrive():
    x = ScaledTensor.encode(torch.randn(8)).requires_grad_()
    spectrum = torch.fft.rfft(x)
    assert type(spectrum) is torch.Tensor
    back = torch.fft.irfft(spectrum)
    assert type(back) is torch.Tensor
    (back * x).sum().backward()
    torch.testing.assert_close(x.grad.decode(), 2 * x.detach().decode(), rtol=1e-2, atol=1e-2)


def test_real_times_complex(seed):
    factor = torch.randn(4, dtype=torch.complex64)
    for operator in (torch.mul, torch.add, torch.sub, torch.div):
        check_rule(lambda x, f=operator: f(x, factor), lambda: (torch.randn(4) + 3,), seed=seed, trials=2, exact=1e-5)
    check_rule(lambda x: x * 2j + 1j, lambda: (torch.randn(4),), seed=seed, trials=2, exact=1e-5)
    check_rule(lambda x: x.to(torch.complex64), lambda: (torch.randn(4),), seed=seed, trials=2, exact=1e-5)
