"""float32_gradients: what accumulation keeps, and where the choice sits."""

import copy

import pytest
import torch

import halfulp as hu
from halfulp.optim import _float32 as _gradients


def model(dtype=torch.bfloat16):
    return torch.nn.Sequential(torch.nn.Linear(16, 24), torch.nn.Tanh(), torch.nn.Linear(24, 4)).to(dtype)


def accumulated(net, batches):
    """The gradients of a sum over microbatches, and the same in float64 from each microbatch's own gradients."""
    exact = [torch.zeros(p.shape, dtype=torch.float64) for p in net.parameters()]
    for batch in batches:
        single = copy.deepcopy(net)
        single(batch).float().square().mean().backward()
        for total, p in zip(exact, single.parameters()):
            total += p.grad.double()
        net(batch).float().square().mean().backward()
    return [p.grad for p in net.parameters()], exact


def error(found, exact):
    found, exact = (torch.cat([t.double().flatten() for t in ts]) for ts in (found, exact))
    return float((found - exact).norm() / exact.norm())


def test_128_microbatches_keep_what_bfloat16_sums_lose(seed):
    batches = torch.randn(128, 8, 16).mul(0.1).add(1).bfloat16()
    net = model()
    narrow = error(*accumulated(copy.deepcopy(net), batches))
    wide = error(*accumulated(hu.float32_gradients(net), batches))
    assert narrow > 1e-2
    assert wide <= 2e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_and_off_convert_what_exists(dtype, seed):
    net = model(dtype)
    net(torch.randn(3, 16, dtype=dtype)).sum().backward()
    before = net[0].weight.grad.clone()
    assert hu.float32_gradients(net) is net
    assert net[0].weight.grad.dtype == torch.float32
    assert torch.equal(net[0].weight.grad, before.float())
    net(torch.randn(3, 16, dtype=dtype)).sum().backward()
    assert {p.grad.dtype for p in net.parameters()} == {torch.float32}
    hu.float32_gradients(net, enabled=False)
    assert {p.grad.dtype for p in net.parameters()} == {dtype}
    net.zero_grad()
    net(torch.randn(3, 16, dtype=dtype)).sum().backward()
    assert {p.grad.dtype for p in net.parameters()} == {dtype}


def test_float32_and_frozen_parameters_are_left_alone(seed):
    net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3).bfloat16())
    net[1].bias.requires_grad_(False)
    hu.float32_gradients(net)
    net[1](net[0](torch.randn(2, 3)).bfloat16()).sum().backward()
    assert [p.grad is None or p.grad.dtype == torch.float32 for p in net.parameters()] == [True] * 4
    assert net[1].bias.grad is None


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(20, 8)
        self.head = torch.nn.Linear(8, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, index):
        return self.head(self.embedding(index))


def test_tied_parameters_and_checkpointing(seed):
    net = hu.float32_gradients(Tied().bfloat16())
    index = torch.randint(20, (5,))
    for use_reentrant in (False, True):
        net.zero_grad()
        net(index).float().square().sum().backward()
        plain = net.head.weight.grad.clone()
        net.zero_grad()
        hidden = net.embedding(index)
        out = torch.utils.checkpoint.checkpoint(net.head, hidden, use_reentrant=use_reentrant)
        out.float().square().sum().backward()
        assert net.head.weight.grad.dtype == torch.float32
        assert torch.allclose(net.head.weight.grad, plain, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("update", ["split8", "stochastic", "kahan"])
def test_steps_clipping_and_zeroing(update, to_none, seed):
    net = hu.float32_gradients(model())
    optimizer = hu.optim.AdamW(net.parameters(), lr=1e-2, weight_update=update)
    before = net[0].weight.detach().clone()
    for _ in range(3):
        for _ in range(2):
            net(torch.randn(4, 16).bfloat16()).float().square().mean().backward()
        norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        assert norm.dtype == torch.float32
        total = torch.cat([p.grad.flatten() for p in net.parameters()]).norm()
        assert total == pytest.approx(min(0.1, float(norm)), rel=1e-3)
        optimizer.step()
        optimizer.zero_grad(set_to_none=to_none)
        grads = [p.grad for p in net.parameters()]
        assert all(g is None if to_none else g.dtype == torch.float32 and not g.any() for g in grads)
    assert not torch.equal(net[0].weight, before)


def test_a_grad_scaler_unscales_float16_models(seed):
    net = hu.float32_gradients(model(torch.float16))
    optimizer = hu.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(net(torch.randn(4, 16).half()).float().square().mean()).backward()
    scaled = net[0].weight.grad.clone()
    scaler.unscale_(optimizer)
    assert torch.equal(net[0].weight.grad, scaled / 1024)
    scaler.step(optimizer)


def test_sparse_embedding_gradients(seed):
    net = hu.float32_gradients(torch.nn.Embedding(9, 4, sparse=True).bfloat16())
    for _ in range(2):
        net(torch.tensor([1, 1, 5])).sum().backward()
    assert net.weight.grad.dtype == torch.float32
    assert net.weight.grad.to_dense()[1].tolist() == [4.0] * 4


def test_a_copy_starts_over(seed):
    net = hu.float32_gradients(model())
    net.to(torch.float16)
    net(torch.randn(2, 16).half()).sum().backward()
    assert net[0].weight.grad.dtype == torch.float32
    net.zero_grad()
    other = copy.deepcopy(net)
    other(torch.randn(2, 16).half()).sum().backward()
    assert other[0].weight.grad.dtype == torch.float16
    other = hu.float32_gradients(other)
    assert other[0].weight.grad.dtype == torch.float32


def test_bad_input(monkeypatch):
    with pytest.raises(TypeError, match="Module"):
        hu.float32_gradients([torch.nn.Parameter(torch.ones(3).bfloat16())])
    monkeypatch.setattr(_gradients, "HAS_GRADIENT_DTYPE", False)
    with pytest.raises(NotImplementedError, match="grad_dtype"):
        hu.float32_gradients(model())
