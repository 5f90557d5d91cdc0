"""Observing changes no bit of a training, and draws no random number."""

import contextlib
import copy

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

import halfulp as hu


class Model(nn.Module):
    """Linear layers, norms, dropout, an in-place activation, a checkpointed block, a shared weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.norm = nn.LayerNorm(32)
        self.batch = nn.BatchNorm1d(32)
        self.block = nn.Sequential(nn.Linear(32, 32), nn.ReLU(inplace=True), nn.Dropout(0.2))
        self.last = nn.Linear(32, 32)
        self.again = nn.Linear(32, 32)
        self.again.weight = self.last.weight
        self.frozen = nn.Parameter(torch.ones(32), requires_grad=False)

    def forward(self, x):
        h = self.batch(self.norm(self.first(x)))
        h = checkpoint(self.block, h, use_reentrant=False)
        return self.again(self.last(h) * self.frozen)


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "adam-amsgrad": lambda p: torch.optim.Adam(p, lr=1e-3, amsgrad=True, foreach=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, centered=True, momentum=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "adamax": lambda p: torch.optim.Adamax(p),
    "nadam": lambda p: torch.optim.NAdam(p, decoupled_weight_decay=True, weight_decay=0.1),
    "radam": lambda p: torch.optim.RAdam(p),
    "rprop": lambda p: torch.optim.Rprop(p),
    "asgd": lambda p: torch.optim.ASGD(p),
    "adafactor": lambda p: torch.optim.Adafactor(p),
    "hu-adamw": lambda p: hu.optim.AdamW(p, lr=1e-3),
    "hu-kahan": lambda p: hu.optim.AdamW(p, lr=1e-3, weight_update="kahan"),
    "hu-stochastic": lambda p: hu.optim.SGD(p, lr=1e-2, momentum=0.9, weight_update="stochastic"),
    "hu-8bit": lambda p: hu.optim.Lion(p, lr=1e-4, state_dtype="8bit"),
    "hu-wrap": lambda p: hu.optim.wrap(torch.optim.AdamW, p, weight_update="split"),
}

NARROW = ("hu-kahan", "hu-stochastic", "hu-wrap")


def trained(optimizer: str, dtype: torch.dtype, watch: bool, interval: int, scaler: str = "none", clip: bool = False):
    torch.manual_seed(3)
    model = Model().to(dtype)
    opt = OPTIMIZERS[optimizer]([p for p in model.parameters() if p.requires_grad])
    scale = {
        "none": lambda: None,
        "torch": lambda: torch.amp.GradScaler("cpu", init_scale=2.0**40),
        "adaptive": lambda: hu.AdaptiveGradScaler(model),
    }[scaler]()
    seen = hu.observe(model, opt, interval=interval)
    if watch:
        seen.start()
    for step in range(4):
        for _ in range(2):
            x = torch.randn(8, 16).to(dtype)
            with torch.autocast("cpu", torch.bfloat16, enabled=scaler == "torch"):
                loss = model(x).float().square().mean()
            (loss if scale is None else scale.scale(loss)).backward()
        if clip and scale is None:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        if scale is None:
            opt.step()
        else:
            scale.step(opt)
            scale.update()
        opt.zero_grad(set_to_none=step % 2 == 0)
    states = copy.deepcopy(opt.state_dict())
    if watch:
        seen.stop()
        assert not seen.record.unseen
        assert seen.record.sampled_steps
    return model.state_dict(), states, torch.get_rng_state()


def assert_same(one, other) -> None:
    if isinstance(one, torch.Tensor):
        assert hu.kernels.same_bits(one.detach(), other.detach())
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for a, b in zip(one, other):
            assert_same(a, b)
    else:
        assert one == other or one is other or callable(one)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("interval", [1, 3])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizers(optimizer, interval):
    dtype = torch.bfloat16 if optimizer in NARROW else torch.float32
    assert_same(trained(optimizer, dtype, False, interval), trained(optimizer, dtype, True, interval))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "rmsprop"])
def test_dtypes(optimizer, dtype):
    assert_same(trained(optimizer, dtype, False, 2, clip=True), trained(optimizer, dtype, True, 2, clip=True))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("scaler", ["torch", "adaptive"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "adamw-fused"])
def test_scalers(optimizer, scaler):
    results = [trained(optimizer, torch.float32, watch, 1, scaler) for watch in (False, True)]
    assert_same(*results)


@pytest.mark.parametrize("kind", ["avg_fn", "multi_avg_fn"])
def test_averages_that_draw_random_numbers(seed, kind):
    def move(average, weight, *_):
        return average.lerp_(weight, float(torch.rand(())))

    def move_all(averages, weights, *_):
        for pair in zip(averages, weights):
            move(*pair)

    start = nn.Linear(4, 4)
    average = AveragedModel(start, **{kind: move if kind == "avg_fn" else move_all})

    def run(watch):
        torch.manual_seed(0)
        model, own = copy.deepcopy((start, average))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with hu.observe(model, optimizer, interval=1, average=own) if watch else contextlib.nullcontext():
            for _ in range(3):
                model(torch.randn(2, 4)).square().mean().backward()
                optimizer.step()
                own.update_parameters(model)
        return own.state_dict(), torch.get_rng_state()

    assert_same(run(False), run(True))
