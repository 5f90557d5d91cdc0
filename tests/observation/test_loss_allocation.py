"""Loss change allocation against sums by an independent quadrature, and what it says of rounding planted in a layer."""

import copy
import json

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import halfulp as hu


def data(seed, count=64):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 6, generator=generator)
    return x, torch.tanh(x @ torch.randn(6, 3, generator=generator))


def small(seed, dtype=torch.float32):
    torch.manual_seed(seed % 2**31)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).to(dtype)


def loss_on(x, y):
    return lambda model: (model(x) - y).square().mean()


def train(model, optimizer, x, y, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        (model(x.to(model[0].weight.dtype)).float() - y).square().mean().backward()
        optimizer.step()


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.2, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "halfulp": lambda p: hu.optim.AdamW(p, lr=1e-2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_shares_sum_to_the_change_of_the_loss_and_training_is_untouched(name, seed):
    x, y = data(seed)
    model, alone = small(seed), small(seed)
    optimizer = OPTIMIZERS[name](model.parameters())
    with hu.observation.allocate_loss(model, optimizer, loss_on(x, y)) as costs:
        train(model, optimizer, x, y, 20)
    train(alone, OPTIMIZERS[name](alone.parameters()), x, y, 20)
    assert all(map(torch.equal, model.state_dict().values(), alone.state_dict().values()))
    assert costs.steps == 20
    assert costs.error < 1e-3
    with torch.no_grad():
        change = float(loss_on(x, y)(model) - loss_on(x, y)(small(seed)))
    assert costs.change == pytest.approx(change, rel=1e-3)
    rounding = sum(abs(share.rounding) for share in costs.shares.values())
    assert rounding < 1e-4 * abs(costs.change)  # float32 weights are hardly rounded


LOOPS = {
    "closure": (lambda p: torch.optim.SGD(p, lr=0.2, momentum=0.9), False),
    "closure of halfulp": (lambda p: hu.optim.AdamW(p, lr=1e-2), False),
    "fused SGD": (lambda p: torch.optim.SGD(p, lr=0.2, momentum=0.9, fused=True), True),
    "fused AdamW": (lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True), True),
}


@pytest.mark.parametrize("name", LOOPS)
def test_closures_and_scaled_gradients_of_fused_steps_are_no_rounding(name, seed):
    x, y = data(seed)
    model = small(seed)
    make, fused = LOOPS[name]
    optimizer, scaler = make(model.parameters()), torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=fused)

    def closure():
        optimizer.zero_grad()
        loss = loss_on(x, y)(model)
        scaler.scale(loss).backward()
        return loss

    with hu.observation.allocate_loss(model, optimizer, loss_on(x, y)) as costs:
        for step in range(5):
            if fused:
                closure()
                scaler.step(optimizer)
                scaler.update()
            else:
                loss = optimizer.step(closure) if step % 2 else optimizer.step(closure=closure)
                assert loss > 0
    assert costs.unsplit == ("halfulp" in name)
    assert costs.change != 0
    rounding = sum(abs(share.rounding) for share in costs.shares.values())
    assert rounding < 1e-4 * abs(costs.change)


def test_a_fused_step_that_the_scaler_skips_wants_nothing():
    x, y = data(0)
    model = small(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    with hu.observation.allocate_loss(model, optimizer, loss_on(x, y)) as costs:
        scaler.scale(loss_on(x, y)(model) * 1e3).backward()
        scaler.step(optimizer)
    assert costs.steps == 1
    assert costs.unsplit == 0
    assert all(share.change == share.rounding == 0 for share in costs.shares.values())


def test_what_calls_its_closure_at_points_of_its_own_is_movement(seed):
    x, y = data(seed)
    model = small(seed)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    def closure():
        optimizer.zero_grad()
        loss = loss_on(x, y)(model)
        loss.backward()
        return loss

    with hu.observation.allocate_loss(model, optimizer, loss_on(x, y)) as costs:
        for _ in range(2):
            optimizer.step(closure)
    assert costs.unsplit == costs.steps == 2
    assert costs.error < 1e-3
    assert all(share.rounding == 0 for share in costs.shares.values())


def test_the_gradients_of_the_model_in_training_stay_whatever_the_loss_reads(seed):
    x, y = data(seed)
    model, alone = small(seed), small(seed)
    loss = loss_on(x, y)

    def train_by_two(model, optimizer):
        for _ in range(2):  # accumulated over two steps
            loss(model).backward()
            optimizer.step()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss(model).backward()
    with (
        pytest.raises(ValueError, match="use its argument"),
        hu.observation.allocate_loss(model, optimizer, lambda _: loss(model)),
    ):
        pass
    with hu.observation.allocate_loss(model, optimizer, lambda copy: loss(copy) + loss(model)):
        train_by_two(model, optimizer)
    loss(alone).backward()
    train_by_two(alone, torch.optim.SGD(alone.parameters(), lr=0.1))
    assert all(map(torch.equal, model.state_dict().values(), alone.state_dict().values()))


def test_a_reentrant_checkpoint_whose_parameters_would_get_no_gradient_is_refused():
    x, y = data(0)
    model = small(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def make_loss(use_reentrant):
        given = x.double().requires_grad_()
        return lambda m: (m[2](checkpoint(m[:2], given, use_reentrant=use_reentrant)) - y).square().mean()

    with (
        pytest.raises(NotImplementedError, match="use_reentrant=False"),
        hu.observation.allocate_loss(model, optimizer, make_loss(True)),
    ):
        pass
    with hu.observation.allocate_loss(model, optimizer, make_loss(False)) as costs:
        train(model, optimizer, x, y, 2)
    assert costs.error < 1e-3


def test_each_share_is_the_integral_of_the_gradient_along_the_step(seed):
    """Oracle: the midpoint rule on 4,000 parts of the straight line, in a loop of its own."""
    x, y = data(seed)
    model, before = small(seed), small(seed).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with hu.observation.allocate_loss(model, optimizer, loss_on(x, y)) as costs:
        train(model, optimizer, x, y, 1)
    after, at = copy.deepcopy(model).double(), copy.deepcopy(before)
    ends = zip(before.named_parameters(), after.parameters(), at.parameters())
    lines = [(name, a.detach(), b.detach() - a.detach(), c) for (name, a), b, c in ends]
    sums, parts = dict.fromkeys(costs.shares, 0.0), 400
    for k in range(parts):
        for _, start, step, moving in lines:
            moving.data.copy_(start + step * (k + 0.5) / parts)
            moving.grad = None
        (at(x.double()) - y).square().mean().backward()
        for name, _, step, moving in lines:
            sums[name] += float((moving.grad * step).sum()) / parts
    for name, wanted in sums.items():
        assert costs.shares[name].change == pytest.approx(wanted, rel=1e-4, abs=1e-7)


def test_the_layer_whose_updates_are_lost_is_charged(seed):
    """A layer in bfloat16 by nearest rounding, the other in float32: all of the cost stands at the former."""
    x, y = data(seed)
    model = small(seed)
    train(model, torch.optim.Adam(model.parameters(), lr=1e-2), x, y, 30)

    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.narrow, self.wide = model[0].bfloat16(), model[2]

        def forward(self, x):
            return self.wide(torch.tanh(self.narrow(x.to(self.narrow.weight.dtype))).to(self.wide.weight.dtype))

    mixed = Mixed()
    optimizer = torch.optim.SGD(mixed.parameters(), lr=1e-3)
    with hu.observation.allocate_loss(mixed, optimizer, loss_on(x, y)) as costs:
        for _ in range(20):
            optimizer.zero_grad()
            loss_on(x, y)(mixed).backward()
            optimizer.step()
    assert costs.error < 1e-3
    lost = costs.shares["narrow.weight"]
    # What the lost updates would have gained is what their rounding has cost.
    assert lost.rounding > 0
    assert lost.rounding > 100 * abs(costs.shares["wide.weight"].rounding)
    assert "narrow.weight" in str(costs).splitlines()[2]


def test_stochastic_rounding_costs_less_than_nearest(seed):
    x, y = data(seed)
    costs = {}
    for update in ("nearest", "kahan"):
        model = small(7, torch.bfloat16)
        optimizer = hu.optim.SGD(model.parameters(), lr=1e-3, weight_update=update)
        with hu.observation.allocate_loss(model, optimizer, loss_on(x, y)) as seen:
            train(model, optimizer, x, y, 30)
        assert seen.unsplit == 1
        assert "not known in 1 of 30" in str(seen)
        costs[update] = sum(share.rounding for share in seen.shares.values())
    assert costs["nearest"] > 2 * abs(costs["kahan"])


def test_writes_between_steps_are_movement_and_a_converted_model_is_taken(seed):
    x, y = data(seed)
    model = hu.convert(small(seed), "bf16-kahan")
    optimizer = hu.recipes.optimizer(model, "SGD", lr=1e-2)
    warned = pytest.warns(RuntimeWarning, match="written between steps, again and again")
    with warned, hu.observation.allocate_loss(model, optimizer, loss_on(x, y)) as costs:
        for _ in range(3):
            with torch.no_grad():
                model[0].weight.mul_(1.5)
            optimizer.zero_grad()
            (model(x) - y).square().mean().backward()
            optimizer.step()
    assert costs.error < 1e-3
    assert set(costs.to_dict()["shares"][0]) == {"name", "elements", "change", "rounding"}


def test_an_error_of_the_training_comes_through_and_no_hook_stays():
    model, (x, y) = small(0), data(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    costs = hu.observation.allocate_loss(model, optimizer, loss_on(x, y))

    def interrupted():
        train(model, optimizer, x, y, 1)
        model[0].weight.data.fill_(torch.nan)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), costs:
        interrupted()
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


def test_entering_twice_is_refused_and_json_holds_what_never_moved():
    model, (x, y) = small(0), data(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hu.observation.allocate_loss(model, optimizer, loss_on(x, y)) as costs:
        with pytest.raises(RuntimeError, match="already"), costs:
            pass
        train(model, optimizer, x, y, 1)
    assert not optimizer._optimizer_step_pre_hooks
    never = hu.observation.allocate_loss(model, optimizer, loss_on(x, y)).to_dict()
    assert json.loads(json.dumps(never, allow_nan=False))["first"] is None


def test_what_cannot_be_allocated_is_refused():
    model = small(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = data(0)
    allocate = hu.observation.allocate_loss
    with pytest.raises(TypeError, match="torch optimizer"):
        allocate(model, None, loss_on(x, y))
    with pytest.raises(TypeError, match="scalar loss"), allocate(model, optimizer, lambda m: 1.0):
        pass
    with (
        pytest.raises(ValueError, match="the loss is inf"),
        allocate(model, optimizer, lambda m: m(x).square().sum() * torch.inf),
    ):
        pass
    with pytest.raises(ValueError, match="no parameter"):
        allocate(small(0).requires_grad_(False), optimizer, loss_on(x, y))
    hu.emulate(model, "bf16")
    with pytest.raises(ValueError, match="emulated"):
        allocate(model, optimizer, loss_on(x, y))
    with pytest.raises(TypeError, match="plain parameters"):
        allocate(hu.scalify(small(0)), optimizer, loss_on(x, y))


def test_a_step_that_calls_its_base_class_is_one_step(seed):
    class Clipped(torch.optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    x, y = data(seed)
    model = small(seed)
    torch.optim.SGD(model.parameters(), lr=0.1)  # from here on torch runs the hooks in its step, too
    optimizer = Clipped(model.parameters(), lr=1e-2)
    with hu.observation.allocate_loss(model, optimizer, loss_on(x, y)) as costs:
        for _ in range(3):
            optimizer.zero_grad()
            (model(x) - y).square().mean().backward()
            optimizer.step()
    assert costs.steps == 3
