"""What a compiled backward graph measures, and what is refused."""

import pytest
import torch
from torch import nn

import halfulp as hu
from halfulp.gradients._compiled_backend import compute_edge_factors, observe_gradients

pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.filterwarnings(
        "ignore:`torch.jit:DeprecationWarning", "ignore:.*should not be instantiated:DeprecationWarning"
    ),
]


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
