"""Attention: against float64, in every mode in which torch's own runs, and refused where torch refuses it."""

import pytest
import torch
import torch.nn.functional as F

from halfulp.mctensor import MCTensor

pytestmark = pytest.mark.filterwarnings("ignore::halfulp.subclass.FallbackWarning")
KINDS = [(2, torch.float32), (3, torch.float32)]  # within float64, and beyond it: counted


def _made(kind, *shape):
    return MCTensor.encode(torch.randn(*shape, dtype=torch.float64), *kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_tensors_that_were_made_outside_a_mode(kind, mode, seed):
    q, k, v = (_made(kind, 2, 4, 5, 8).requires_grad_() for _ in range(3))
    with mode():
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        assert not found.requires_grad
        found = found.decode()
        wanted = F.scaled_dot_product_attention(q.decode(), k.decode(), v.decode(), is_causal=True)
    assert (found - wanted).abs().max() < 2.0**-44


@pytest.mark.parametrize("kind", KINDS)
def test_a_mask_of_integers_is_refused_and_no_keys_give_zeros(kind, seed):
    q, k = _made(kind, 1, 2, 5, 8), _made(kind, 1, 2, 0, 8)
    with pytest.raises((TypeError, RuntimeError), match=r"attn_mask.* bool .*(int64|long)"):
        F.scaled_dot_product_attention(q, q, q, attn_mask=torch.ones(5, 5, dtype=torch.int64))
    assert torch.equal(F.scaled_dot_product_attention(q, k, k).decode(), torch.zeros(1, 2, 5, 8, dtype=torch.float64))


@pytest.mark.parametrize("kind", KINDS)
def test_it_has_autocasts_dtype_as_products_have(kind, seed):
    q = _made(kind, 1, 2, 5, 8).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        found = F.scaled_dot_product_attention(q, q, q, attn_mask=torch.zeros(5, 5))
        assert found.dtype == (q @ q.mT).dtype == torch.bfloat16
    assert torch.autograd.grad(found.sum(), q)[0].dtype == torch.float32
    wide = F.scaled_dot_product_attention(*3 * [q.detach().decode()])
    assert (found.detach().decode() - wide).abs().max() < 2.0**-5
