"""What edges make of a tensor lies in memory as the tensor does, as the order of sums follows its strides."""

import itertools
import random

import pytest
import torch
from torch import nn

import halfulp as hu
from halfulp.gradients.eager._backward import Backward
from halfulp.gradients.eager._strides import copy_with_strides, times_power_of_two
from halfulp.kernels import same_bits

from ..exponents import WIDTH, assert_same, batch, plainly, scrambled

VIEWS = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.transpose(0, 2),
    "columns": lambda x: x[..., 3:7],
    "rows": lambda x: x[1:],
    "every second": lambda x: x[:, ::2, ::3],
    "one of many": lambda x: x[:, :, 5],
    "expanded": lambda x: x[:, :1].expand(-1, 9, -1),
    "a number expanded": lambda x: x[2, 2, 2].expand(4, 5),
    "expanded columns": lambda x: x[..., 2:5].unsqueeze(1).expand(-1, 3, -1, -1),
    "overlapping": lambda x: x.flatten()[:20].unfold(0, 5, 1),
    "empty": lambda x: x[:0],
    "a number": lambda x: x[1, 2, 3],
    "ones among the sizes": lambda x: x[:1, 2:3],
}


def pattern(x):
    """What a kernel sees of strides: which are 0 or 1, their order, which dimensions are one, and the alignment."""
    sized = [i for i, n in enumerate(x.shape) if n > 1]
    order = sorted(sized, key=lambda i: (x.stride(i), i))
    one = [x.stride(b) == x.stride(a) * x.shape[a] for a, b in itertools.pairwise(order)]
    unit = 64 // x.element_size()
    kinds = [min(x.stride(i), 2) for i in sized], [x.stride(i) % unit for i in sized]
    return order, one, kinds, x.storage_offset() % unit


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.complex64])
def test_a_shifted_gradient_lies_as_it_did(view, dtype, seed):
    x = VIEWS[view](torch.randn(4, 6, 12).to(dtype))
    for exponent in (-3, 5):
        out = times_power_of_two(x, exponent)
        assert same_bits(out.contiguous(), x.contiguous() * 2.0**exponent)
        assert out.data_ptr() != x.data_ptr() or not x.numel()
        if x.numel() and view != "overlapping":
            assert pattern(out) == pattern(x)
            assert out.data_ptr() % 64 == x.data_ptr() % 64
    assert times_power_of_two(x, 0) is x


@pytest.mark.parametrize("view", VIEWS)
def test_an_output_is_a_copy_that_lies_as_it_did(view, seed):
    leaf = torch.randn(4, 6, 12, requires_grad=True)
    x = VIEWS[view](leaf * 1)
    out, g = copy_with_strides(x), torch.randn(x.shape)
    assert same_bits(out.detach().contiguous(), x.detach().contiguous())
    if x.numel() and view != "overlapping":
        assert out.stride() == x.stride() or pattern(out)[:3] == pattern(x)[:3]
    wanted, found = (torch.autograd.grad(y, leaf, g, retain_graph=True)[0] for y in (x, out))
    assert same_bits(found, wanted)


def test_a_part_of_a_large_tensor_takes_no_more_memory_than_a_few_of_its_own(seed):
    for x in (torch.randn(64, 1024)[:, 7], torch.randn(64, 100, 32)[:, 0], torch.randn(8, 32, 64)[:, ::16, ::16]):
        memory = times_power_of_two(x, 1).untyped_storage().nbytes()
        assert memory <= 32 * x.numel() * x.element_size()
        assert pattern(times_power_of_two(x, 1)) == pattern(x)


class Joined(nn.Module):
    """Gradients that are parts of others, or expanded, on their way into sums."""

    def __init__(self, kind):
        super().__init__()
        self.a, self.b, self.w = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Parameter(torch.randn(1))
        self.out, self.kind = nn.Linear(4 * WIDTH, 3), kind

    def forward(self, x):
        h, other = self.a(x) + self.w, self.b(x)
        match self.kind:
            case "joined":
                return self.out(torch.cat([h, other], 1))
            case "stacked":
                return self.out(torch.cat([torch.stack([other, h], 2).flatten(1)], 0))
            case "averaged":
                return h.mean(0) + other.sum(0)
            case "columns":
                return (h * other)[:, ::2]
            case "expanded":
                return (self.w * h[:1]).expand(len(x), -1)


@pytest.mark.parametrize("kind", ["joined", "stacked", "averaged", "columns", "expanded"])
@pytest.mark.parametrize("mode", ["function", "module"])
def test_edges_keep_the_strides_of_every_gradient_and_output(kind, mode, seed, monkeypatch):
    rows = random.choice([1, 3, 17, 64])
    model, x = Joined(kind), batch(rows)
    seen = []

    def run():
        out = model(x)
        seen.append(pattern(out.detach())[:3])
        return out.square().sum() / out.numel() + out.sum()

    wanted, loss = plainly(seed, run, model), run().detach()
    scaler = hu.AdaptiveGradScaler(model, mode=mode)
    make, checked = Backward._make_edge_hook, []

    def watching(self, source, target):
        hook = make(self, source, target)

        def look(gradients):
            out = hook(gradients)
            if out is not None:
                checked.append(pattern(out[0]) == pattern(gradients[0]))
            return out

        return look

    monkeypatch.setattr(Backward, "_make_edge_hook", watching)
    # Random exponents of two sites may be equal, and an edge between them then gives its gradient on as it is.
    for more in range(4):
        if not checked:
            assert_same(scrambled(seed + more, scaler, lambda: scaler.scale(run()).backward(), model), wanted)
    assert same_bits(run().detach(), loss)
    assert all(one == seen[0] for one in seen)
    assert checked
    assert all(checked)


def test_the_law_sees_a_gradient_made_contiguous(seed):
    x = torch.randn(4, 6, 12)
    for view in ("columns", "rows", "every second", "one of many", "expanded"):
        assert pattern(VIEWS[view](x) * 2.0) != pattern(VIEWS[view](x)), view
