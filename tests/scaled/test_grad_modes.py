"""A norm without eps and formulas that conjugate give the same numbers in every grad mode."""

import pytest
import torch

from halfulp._torch_floor import is_older
from halfulp.kernels import same_bits
from halfulp.scaled import ScaledTensor


@pytest.mark.parametrize("logical", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_rms_norm_without_eps_takes_torchs_in_every_mode(logical, seed):
    x, found = torch.randn(4, 8) * 2.0**-6 * 1e-2, []
    x = x.to(logical).double()
    # torch 2.6 takes the eps of the 16-bit dtype itself.
    computed_in = logical if is_older(torch.__version__, "2.7") else torch.promote_types(logical, torch.float32)
    eps = torch.finfo(computed_in).eps
    wanted = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode():
            scaled = ScaledTensor.encode(x.to(logical), torch.float32).requires_grad_(mode is torch.enable_grad)
            found.append(torch.rms_norm(scaled, (8,)).detach().decode(torch.float64))
    assert all(same_bits(found[0], other) for other in found[1:])
    assert (found[0] - wanted).abs().max() <= 1e-5 * wanted.abs().max()


@pytest.mark.parametrize("name", ["hfft2", "hfftn", "ihfft2", "ihfftn", "irfft2", "fft2"])
def test_formulas_that_conjugate_do_so_inside_rules(name, seed):
    """torch leaves a conjugate undone until a kernel wants it, and below autograd nobody would do it."""
    x, function = torch.randn(4, 6), getattr(torch.fft, name)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            found = function(ScaledTensor.encode(x, torch.float32))
        found = found.decode() if isinstance(found, ScaledTensor) else found
        torch.testing.assert_close(found, function(x), rtol=1e-5, atol=1e-5)
