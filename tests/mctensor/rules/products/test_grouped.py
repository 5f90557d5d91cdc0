"""grouped_mm of MCTensors: every kind is a matmul for each group, and so are its gradients."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from halfulp.mctensor import MCTensor
from halfulp.mctensor._convert_model import multicomponent
from halfulp.subclass import strict

KINDS = {
    "rows": ((7, 5), (3, 5, 4)),
    "columns": ((3, 6, 5), (5, 7)),
    "inner": ((6, 7), (7, 4)),
    "batch": 2 * ((3, 5, 5),),
}
FORMS = [(2, torch.bfloat16), (2, torch.float16), (2, torch.float32), (2, torch.float64), (3, torch.float32)]
ENDS = [2, 2, 6]  # an empty group, and one element behind the last


def by_groups(a: MCTensor, b: MCTensor, kind: str) -> MCTensor:
    """The definition: one product for each group, zeros behind the last."""
    if kind == "batch":
        return torch.stack([x @ y for x, y in zip(a, b)])
    slices = [slice(start, end) for start, end in zip([0, *ENDS], ENDS)]
    if kind == "inner":
        return torch.stack([a[:, at] @ b[at] for at in slices])
    if kind == "rows":
        return torch.cat([*(a[at] @ b[g] for g, at in enumerate(slices)), torch.zeros(1, 4, dtype=a.dtype)])
    return torch.cat([*(a[g] @ b[:, at] for g, at in enumerate(slices)), torch.zeros(6, 1, dtype=a.dtype)], 1)


def grouped(a: MCTensor, b: MCTensor, kind: str) -> MCTensor:
    return F.grouped_mm(a, b, offs=None if kind == "batch" else torch.tensor(ENDS, dtype=torch.int32))


def operands(kind: str, components: int, dtype: torch.dtype) -> list[MCTensor]:
    wide = (torch.randn(shape, dtype=torch.float64) for shape in KINDS[kind])
    made = [MCTensor.encode(x, components, dtype, gradients="components") for x in wide]
    return [x.requires_grad_() for x in made]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("components", "dtype"), FORMS)
def test_each_group_is_its_own_product(kind, components, dtype, seed):
    a, b = operands(kind, components, dtype)
    with strict():
        got = grouped(a, b, kind)
        wanted = by_groups(a, b, kind)
        factor = torch.randn(wanted.shape, dtype=torch.float64).to(dtype)
        ours = torch.autograd.grad((got * factor).sum(), (a, b))
        theirs = torch.autograd.grad((wanted * factor).sum(), (a, b))
    assert got.shape == wanted.shape
    for x, y in zip((got, *ours), (wanted, *theirs)):
        assert float((x - y).detach().abs().max()) <= 2**8 * (torch.finfo(dtype).eps / 2) ** components


def test_plain_operands_keep_the_digits(seed):
    weight = torch.randn(3, 5, 4)
    x = MCTensor.encode(torch.randn(7, 5, dtype=torch.float64), 2, torch.float32)
    assert torch.equal(grouped(x, weight, "rows"), by_groups(x, MCTensor.encode(weight, 2), "rows"))


def test_what_does_not_fit_is_named():
    x, experts = MCTensor.encode(torch.ones(7, 5)), MCTensor.encode(torch.ones(3, 5, 4))
    for offsets in ([2, 1, 6], [2, 3, 8]):
        with pytest.raises(ValueError, match="never decrease, from 0 to 7"):
            F.grouped_mm(x, experts, offs=torch.tensor(offsets, dtype=torch.int32))
    with pytest.raises(ValueError, match="one integer offset for each of 3 groups"):
        F.grouped_mm(x, experts, offs=torch.tensor([2, 7], dtype=torch.int32))
    with pytest.raises(ValueError, match="grouped_mm takes"):
        F.grouped_mm(x, experts)


class Mixture(nn.Module):
    """A layer of four experts, of which each token takes two."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(8, 4, bias=False)
        self.up = nn.Parameter(torch.randn(4, 8, 12) * 0.3)
        self.down = nn.Parameter(torch.randn(4, 12, 8) * 0.3)

    def forward(self, x):
        weights, chosen = self.gate(x).softmax(-1).topk(2)
        order = chosen.flatten().argsort(stable=True)
        ends = torch.bincount(chosen.flatten(), minlength=4).cumsum(0).to(torch.int32)
        hidden = F.grouped_mm(x[order // 2], self.up, offs=ends)
        out = F.grouped_mm(F.silu(hidden), self.down, offs=ends) * weights.flatten()[order].unsqueeze(-1)
        return torch.zeros_like(x).index_add(0, order // 2, out)


@pytest.mark.parametrize(("components", "dtype", "bound"), [(2, torch.bfloat16, 0.02), (2, torch.float32, 1e-5)])
def test_a_mixture_of_experts_trains(components, dtype, bound, seed):
    start, x = Mixture(), torch.randn(20, 8)
    losses = []
    for model in (multicomponent(copy.deepcopy(start), components, dtype, gradients="components"), start):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for _ in range(5):
            optimizer.zero_grad()
            loss = (model(x) - x).square().mean()
            loss.backward()
            optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[1] < 2
    assert losses[0] == pytest.approx(losses[1], rel=bound)


def test_compiled(seed, fresh_compiler):
    a, b = operands("rows", 2, torch.float32)
    ends, grouped_mm = torch.tensor(ENDS, dtype=torch.int32), F.grouped_mm
    compiled = torch.compile(lambda a, b: grouped_mm(a, b, offs=ends), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(a, b), F.grouped_mm(a, b, offs=ends))
