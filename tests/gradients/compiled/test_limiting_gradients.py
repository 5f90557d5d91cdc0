"""What a compiled backward graph measures, which forward functions its nodes belong to, and what is refused."""

import pytest
import torch
from torch import nn

import halfulp as hu
from halfulp._torch_versions import is_backward, is_gradient_sum
from halfulp.gradients import _compiled_backend as _compiled
from halfulp.gradients._compiled_backend import compute_edge_factors, name_forward_functions, observe_gradients

from ..models.architectures import Case, build

pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.filterwarnings(
        "ignore:`torch.jit:DeprecationWarning", "ignore:.*should not be instantiated:DeprecationWarning"
    ),
]


class Written(nn.Module):
    """Writes into whole tensors and views of them, with and without a clone that autograd keeps."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(12, 3)

    def forward(self, x):
        one, other = self.first(x), self.second(x)
        one.mul_(other.sigmoid())
        one[:, 1] = other[:, 0].tanh()
        one[:, 2:].mul_(other[:, :10].cos())
        one.neg_().add_(other, alpha=0.5)
        one += other.abs().clone().mul_(1.5).sub_(one.mean(1, keepdim=True))
        one[:, ::2].copy_(other[:, ::2].exp()).clamp_(max=3)
        return self.last(one.div_(other.square().add_(1)).masked_fill_(other > 1, 0))


def test_every_derivative_is_of_a_function(seed, monkeypatch, needs_torch):
    """Sums of gradients are of none; the eager front end's bits hang on what all others are of."""
    unnamed, named = [], 0

    def checked(joint):
        nonlocal named
        name_forward_functions(joint)
        made = [node for node in joint.graph.nodes if is_backward(node) and node.op == "call_function"]
        made = [node for node in made if not is_gradient_sum(node)]
        named += len(made)
        unnamed.extend(node.format_node() for node in made if not node.meta.get("fwd_source_fn_stack"))

    monkeypatch.setattr(_compiled, "name_forward_functions", checked)
    needs_torch("slices of some dimensions alone")  # in torch 2.6 the others' are copies of no function
    torch.manual_seed(seed)
    written = Case(Written(), (torch.randn(5, 8),), lambda out: out.square().sum())
    for case in (written, build("in-place-columns", seed % 1000)):
        scaler = hu.AdaptiveGradScaler(case.model)
        run = torch.compile(case.model, backend=scaler.backend("aot_eager"))
        scaler.scale(case.loss(run(*case.batch))).backward()
    assert named > 100
    assert unnamed == []


class Quiet(nn.Module):
    """Between its layers gradients shrink, and what the last one makes for its weight is far larger."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 3)

    def forward(self, x):
        return self.last(self.first(x).relu() * 1e-4)


class Branches(nn.Module):
    """Residual branches of little weight; what is added up is wide, and becomes narrow inside of a branch."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(3))
        self.ups, self.downs = (nn.ModuleList(nn.Linear(*shape) for _ in range(3)) for shape in ((16, 32), (32, 16)))
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 3)

    def forward(self, x):
        x = self.first(x).float()
        for norm, up, down in zip(self.norms, self.ups, self.downs):
            x = x + 1e-3 * down(nn.functional.gelu(up(norm(x))))
        return self.last(x)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("make", [Quiet, Branches])
def test_all_that_may_overflow_is_measured(make, seed):
    torch.manual_seed(seed)
    model, x, y = make(), torch.randn(64, 8), torch.randn(64, 3)
    scaler = hu.AdaptiveGradScaler(model)
    run = torch.compile(model, backend=scaler.backend("aot_eager"))
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    applied = []
    for _ in range(40):
        opt.zero_grad()
        with torch.autocast("cpu", torch.float16):
            out = run(x)
        scaler.scale((out.float() - y).square().mean()).backward()
        scaler.step(opt)
        scaler.update()
        applied.append(scaler.last_step.applied)
    assert all(applied[12:])


@pytest.mark.parametrize("operator", [compute_edge_factors, observe_gradients])
def test_no_cuda_graph_replays_what_the_scaler_decides(operator, needs_torch):
    needs_torch("Tag.cudagraph_unsafe")
    assert torch.Tag.cudagraph_unsafe in operator.tags


@pytest.mark.parametrize("options", [{"format": "e5m2"}, {"policy": "underflow-bound"}])
def test_formats_and_policies_that_read_operands_are_refused(options):
    scaler = hu.AdaptiveGradScaler(nn.Linear(2, 2), **options)
    with pytest.raises(NotImplementedError, match="leave the model uncompiled, or"):
        scaler.backend("aot_eager")
