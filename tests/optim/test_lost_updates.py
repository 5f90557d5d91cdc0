"""The lost-update meter against a brute-force count, its words and its warning."""

import re
import warnings

import pytest
import torch

import halfulp as hu

from ..laws.optim.cases import UPDATES, Adder, narrow_updates


def _sgd(model, update, report_interval=1, lr=1.0):
    return hu.optim.SGD(model.named_parameters(), lr=lr, weight_update=update, report_interval=report_interval)


def _model(seed):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.Linear(30, 7)).bfloat16()


@pytest.mark.parametrize("engine", ["reference", "llvm"])
@pytest.mark.parametrize("update", ["nearest", "kahan", "split8"])
def test_counts_are_a_brute_force_count(seed, engine, update):
    model = _model(seed)
    optimizer = _sgd(model, update)
    counts = {name: [0, 0, 0.0, 0.0] for name, _ in model.named_parameters()}
    for _ in range(4):
        before = optimizer.float32_state_dict(model)
        for parameter in model.parameters():
            parameter.grad = (torch.randn_like(parameter) * 2.0**-9) * (torch.rand_like(parameter) < 0.9)
        with hu.kernels.engine(engine):
            optimizer.step()
        for name, value in optimizer.float32_state_dict(model).items():
            u, change = -dict(model.named_parameters())[name].grad.double(), value.double() - before[name].double()
            counts[name][0] += int((u != 0).sum())
            counts[name][1] += int(((u != 0) & (change == 0)).sum())
            counts[name][2] += float((u * u).sum())
            counts[name][3] += float((u * change).sum())
    report = optimizer.report()
    assert {row.name for row in report.rows} == set(counts)
    for row in report.rows:
        seen, cancelled, wanted, kept = counts[row.name]
        assert row.samples == 4
        assert row.updates == seen
        assert row.cancelled == cancelled / seen
        assert row.realised == pytest.approx(kept / wanted, rel=1e-9)
    assert report.cancelled == sum(c[1] for c in counts.values()) / sum(c[0] for c in counts.values())
    assert [row.cancelled for row in report.rows] == sorted((row.cancelled for row in report.rows), reverse=True)


# Feedback needs a first moment, and only bfloat16 is the upper half of a float32 word.
READ = [(x, "bf16", "reference") for x in narrow_updates() if not UPDATES[x].feeds_back]
READ += [(x, "fp16", "reference") for x, _, _ in READ if x not in ("split", "split-stochastic")]
READ += [(x, "bf16", "llvm") for x in ("kahan", "split", "components-3", "components-4")]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("update", "store", "engine"), READ)
def test_the_new_weight_is_the_one_that_is_read(seed, update, store, engine):
    """Of every weight update: far components and ties make the order of a sum show in its last bit."""
    start = 1 + torch.randint(0, 8, (4096,)) * 2.0**-7
    held = Adder(update, start, store, engine=engine, report_interval=1)
    # 1 + 2^-24 + 2^-48 + 2^-56, of which float32 keeps 1 + 2^-23 if the smallest are summed first, and others around.
    steps = [torch.full_like(start, 2.0**k) for k in (-24, -48, -56)]
    steps += [
        torch.exp2(-torch.randint(6, 60, start.shape).float()) * torch.randn(start.shape).sign() for _ in range(5)
    ]
    cancelled = wanted = kept = 0.0
    for u in steps:
        before = held.weight
        held.add(u)
        change = held.weight.double() - before.double()
        cancelled += int((change == 0).sum())
        wanted += float(u.double().square().sum())
        kept += float((u.double() * change).sum())
    (row,) = held.optimizer.report().rows
    assert row.updates == len(steps) * start.numel()
    assert row.cancelled == cancelled / row.updates
    assert row.realised == pytest.approx(kept / wanted, rel=1e-9)


def test_only_every_so_many_steps_are_metered(seed):
    model = _model(seed)
    optimizer = _sgd(model, "nearest", report_interval=5)
    assert optimizer.report().cancelled is None
    assert "none metered yet" in str(optimizer.report())
    for _ in range(14):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    assert {row.samples for row in optimizer.report().rows} == {2}
    never = _sgd(model, "nearest", report_interval=0)
    for _ in range(60):
        never.step()
    assert never.report().rows == ()


def test_the_report_names_the_tensors_and_the_cure(seed):
    model = _model(seed)
    optimizer = _sgd(model, "nearest")
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 2.0**-40)
    model[0].bias.grad = torch.ones(30).bfloat16()
    optimizer.step()
    text = str(optimizer.report())
    assert "1.weight: 100% cancelled (nearest)" in text
    assert re.search(r"'split8'.*'kahan'.*'stochastic'", text)
    assert text in repr(optimizer)
    assert "SGD" in repr(optimizer)


def _lost(steps, report_interval=1, update="nearest", grad=2.0**-20):
    parameter = torch.nn.Parameter(torch.ones(64).bfloat16())
    optimizer = hu.optim.SGD([("w", parameter)], lr=1.0, weight_update=update, report_interval=report_interval)
    parameter.grad = torch.full_like(parameter, grad)
    with hu.kernels.engine("reference"):
        for _ in range(steps):
            optimizer.step()
    return optimizer


def test_nearest_warns_once_after_a_hundred_sampled_steps():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer = _lost(99)
    with (
        pytest.warns(RuntimeWarning, match="100% of the updates of parameter w .*split8"),
        hu.kernels.engine("reference"),
    ):
        optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(120):
            optimizer.step()


@pytest.mark.parametrize("case", [{"update": "kahan"}, {"grad": 2.0**-6}, {"report_interval": 2, "steps": 190}])
def test_it_does_not_where_there_is_nothing_to_say(case):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _lost(**{"steps": 130, **case})


def test_nan_and_infinite_updates_are_not_counted():
    parameter = torch.nn.Parameter(torch.ones(4).bfloat16())
    optimizer = hu.optim.SGD([parameter], lr=1.0, weight_update="nearest", report_interval=1)
    parameter.grad = torch.tensor([1.0, torch.nan, torch.inf, 0.0]).bfloat16()
    optimizer.step()
    (row,) = optimizer.report().rows
    assert (row.updates, row.cancelled, row.realised) == (1, 0, 1)
