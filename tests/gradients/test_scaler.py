"""AdaptiveGradScaler as torch's GradScaler: the same calls, and with one scale the same numbers."""

import copy
import io
import weakref

import pytest
import torch
from torch import nn

import halfulp as hu
from halfulp.gradients import Dynamic, Measured
from halfulp.gradients import _site as _powers
from halfulp.kernels import same_bits

from .exponents import (
    WIDTH,
    Spiked,
    assert_same,
    batch,
    clear,
    gradients,
    mean_square,
    mlp,
    plainly,
    scramble,
    scrambled,
    sites,
)


def state(model):
    return {key: value.clone() for key, value in model.state_dict().items()}


def assert_same_state(a, b):
    assert a.keys() == b.keys()
    assert all(same_bits(a[key], b[key]) for key in a)


def train(scaler, model, steps, *, overflows=(), optimizer=torch.optim.SGD, clip=None, accumulate=1):
    """The scales after every step and which were applied; overflows are put into gradients."""
    opt = optimizer(model.parameters(), lr=0.05)
    scales, applied = [], []
    generator = torch.Generator().manual_seed(0)
    for step in range(steps):
        opt.zero_grad()
        for _ in range(accumulate):
            x = torch.randn(4, 8, generator=generator)
            scaler.scale(mean_square(model(x) - x) / accumulate).backward()
        if step in overflows:
            model[0].weight.grad[0, 0] = torch.inf if step % 2 else torch.nan
        before = state(model)
        if clip:
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(opt)
        scaler.update()
        scales.append(scaler.get_scale())
        applied.append(any(not torch.equal(before[key], value) for key, value in model.state_dict().items()))
    return scales, applied


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("options", [{}, {"clip": 0.01}, {"accumulate": 3}])
def test_dynamic_is_grad_scaler(optimizer, options, seed):
    ours, theirs = mlp(), mlp()
    theirs.load_state_dict(ours.state_dict())
    interval, start = 4, 2.0**12
    overflows = {3, 4, 11, 22, 23, 24, 40}
    reference = torch.amp.GradScaler("cpu", init_scale=start, growth_interval=interval)
    scaler = hu.AdaptiveGradScaler(ours, policy=Dynamic(growth_interval=interval), init_scale=start)
    wanted = train(reference, theirs, 50, overflows=overflows, optimizer=optimizer, **options)
    found = train(scaler, ours, 50, overflows=overflows, optimizer=optimizer, **options)
    assert found == wanted
    assert [step for step, applied in enumerate(found[1]) if not applied] == sorted(overflows)
    assert len(set(found[0])) > 4
    assert_same_state(state(ours), state(theirs))


def test_step_returns_what_the_optimizer_does(seed):
    class Talking(torch.optim.SGD):
        def step(self, *args, **kwargs):
            super().step()
            return "stepped", args, kwargs

    model, x = mlp(), batch()
    scaler, opt = hu.AdaptiveGradScaler(model), Talking(model.parameters(), lr=0.1)
    scaler.scale(mean_square(model(x))).backward()
    assert scaler.step(opt) == ("stepped", (), {})
    scaler.update()
    clear(model)
    scaler.scale(mean_square(model(x))).backward()
    model[0].weight.grad[0, 0] = torch.inf
    assert scaler.step(opt) is None
    assert not scaler.last_step.applied


def test_disabled_is_a_disabled_grad_scaler(seed):
    model, x = mlp(), batch()
    hooks = [len(m._forward_hooks) for m in model.modules()]
    scaler = hu.AdaptiveGradScaler(model, enabled=False)
    assert "forward" not in vars(model)
    assert [len(m._forward_hooks) for m in model.modules()] == hooks
    loss = mean_square(model(x))
    assert scaler.scale(loss) is loss
    losses = [loss, (loss,)]
    assert scaler.scale(losses) is losses
    assert scaler.get_scale() == 1.0
    assert not scaler.is_enabled()
    assert scaler.state_dict() == {}
    scaler.load_state_dict({})
    scaler.unscale_(opt := torch.optim.SGD(model.parameters(), lr=0.1))
    loss.backward()
    wanted = [p.detach() - 0.1 * p.grad for p in model.parameters()]
    assert scaler.step(opt, closure=None) is None
    assert all(torch.allclose(p, q) for p, q in zip(model.parameters(), wanted))
    scaler.update()
    hu.AdaptiveGradScaler(model)


def test_what_it_says_of_itself(seed):
    scaler = hu.AdaptiveGradScaler(mlp(), init_scale=2.0**9)
    assert isinstance(scaler, torch.amp.GradScaler)
    assert scaler.is_enabled()
    assert scaler.get_scale() == 2.0**9
    assert scaler.last_step is None


def test_the_scaled_loss_is_the_loss_times_the_scale(seed):
    model, x = mlp(), batch()
    scaler = hu.AdaptiveGradScaler(model, init_scale=2.0**9)
    loss = mean_square(model(x))
    assert torch.equal(scaler.scale(loss), loss * 2.0**9)
    one, (two, three) = scaler.scale([loss, (2 * loss, 3 * loss)])
    assert [one, two, three] == [loss * 2.0**9, 2 * loss * 2.0**9, 3 * loss * 2.0**9]
    assert list(scaler.scale(iter([loss]))) == [loss * 2.0**9]


def test_clipping_sees_true_gradients(seed):
    model, x = mlp(), batch()
    mean_square(model(x)).backward()
    wanted = nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    clipped = [p.grad.clone() for p in model.parameters()]
    clear(model)
    scaler, opt = hu.AdaptiveGradScaler(model), torch.optim.SGD(model.parameters(), lr=0.1)
    scaler.scale(mean_square(model(x))).backward()
    scramble(scaler)
    scaler._controller.backward.end_iteration()
    clear(model)
    scaler.scale(mean_square(model(x))).backward()
    scaler.unscale_(opt)
    assert torch.equal(nn.utils.clip_grad_norm_(model.parameters(), 1e-3), wanted)
    assert all(torch.equal(p.grad, gradient) for p, gradient in zip(model.parameters(), clipped))
    scaler.step(opt)
    scaler.update()


def test_a_new_scale_is_the_global_one(seed):
    model, x = mlp(), batch()
    scaler, opt = hu.AdaptiveGradScaler(model), torch.optim.SGD(model.parameters(), lr=0.1)
    for new in (2.0**5, torch.tensor(2.0**-3), 2**7):
        clear(model)
        loss = mean_square(model(x))
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update(new)
        assert scaler.get_scale() == float(new)
        assert scaler.last_step.applied
    assert torch.equal(scaler.scale(loss.detach()), loss * 2.0**7)


OPTIONS = [{"format": "fp16", "interval": 3}, {"policy": "measured", "format": "fp16", "interval": 1}]
DYNAMIC = [{"policy": Dynamic(growth_interval=5)}, {"format": "fp16", "interval": 4}]
LOST = "a state lacks when the scale changed last, and whether the next iteration is measured"


@pytest.mark.parametrize("options", [*OPTIONS, *(o for o in DYNAMIC)])
def test_resumed_is_uninterrupted(options, seed):
    start = state(mlp())

    def made(where, scaler_state=None):
        model = mlp()
        model.load_state_dict(where)
        scaler = hu.AdaptiveGradScaler(model, **options)
        if scaler_state:
            scaler.load_state_dict(scaler_state)
        return model, scaler, torch.optim.SGD(model.parameters(), lr=0.05)

    def go(model, scaler, opt, first, last):
        trail = []
        for step in range(first, last):
            opt.zero_grad()
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
            scaler.scale(mean_square(model(x)) * 2.0 ** (step % 5)).backward()
            scaler.step(opt)
            scaler.update()
            trail.append(sites(scaler))
        return trail

    whole = made(start)
    wanted = go(*whole, 0, 18)
    first = made(start)
    go(*first, 0, 6)
    file = io.BytesIO()
    torch.save({"model": first[0].state_dict(), "scaler": first[1].state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    second = made(saved["model"], saved["scaler"])
    assert sites(second[1]) == wanted[5]
    assert go(*second, 6, 18) == wanted[6:]
    assert len({tuple(one.values()) for one in wanted}) > 1
    assert_same_state(state(second[0]), state(whole[0]))
    assert second[1].state_dict() == whole[1].state_dict()


@pytest.mark.parametrize("at", ["scale", "backward", "unscale", "step"])
@pytest.mark.parametrize("options", [{"interval": 1}, {"interval": 1, "policy": "underflow-bound"}], ids=str)
def test_a_state_that_is_loaded_within_an_iteration_begins_it_anew(options, at, seed):
    """As where a loss that is not finite sends the training back to its last checkpoint."""
    model = mlp()
    scaler, opt = hu.AdaptiveGradScaler(model, format="fp16", **options), torch.optim.SGD(model.parameters(), lr=0.0)

    def run_until(end, factor):
        torch.manual_seed(seed)
        opt.zero_grad()
        scaled = scaler.scale(mean_square(model(batch())) * factor)
        for name, act in {"backward": scaled.backward, "unscale": lambda: scaler.unscale_(opt)}.items():
            if end in (name, "step", "update") or (end == "unscale" and name == "backward"):
                act()
        if end in ("step", "update"):
            scaler.step(opt)
        if end == "update":
            scaler.update()

    run_until("update", 1.0)
    saved = scaler.state_dict()
    run_until("update", 2.0**-9)
    wanted = scaler.state_dict()
    scaler.load_state_dict(saved)
    run_until(at, torch.inf)
    scaler.load_state_dict(saved)
    run_until("update", 2.0**-9)
    assert scaler.last_step.applied
    assert scaler.state_dict() == wanted


@pytest.mark.parametrize("merged", [(), ("2",)])
@pytest.mark.parametrize("options", OPTIONS + DYNAMIC, ids=str)
def test_a_state_of_before_the_first_iteration_begins_the_training_anew(options, merged, seed):
    """As a search for the learning rate does, which goes back to the start."""
    model = mlp()
    scaler, weights = hu.AdaptiveGradScaler(model, **options), copy.deepcopy(model.state_dict())
    scaler.merge_into_global_site(*merged)
    saved, found = scaler.state_dict(), []
    for _ in range(2):
        torch.manual_seed(seed)
        for _ in range(6):
            step_once(model, scaler)
        found.append((copy.deepcopy(scaler.state_dict()), sites(scaler)))
        scaler.load_state_dict(saved)
        model.load_state_dict(weights)
    assert found[0] == found[1] != (saved, sites(scaler))
    assert all(row.exponent == 16 for row in scaler.sites())


def test_a_grad_scalers_state_is_refused_with_the_scale_to_start_from(seed):
    model = mlp()
    reference = torch.amp.GradScaler("cpu", init_scale=2.0**7)
    reference.scale(mean_square(model(batch())))
    scaler = hu.AdaptiveGradScaler(model)
    with pytest.raises(ValueError, match=r"AdaptiveGradScaler\(model, init_scale=128\.0\)"):
        scaler.load_state_dict(reference.state_dict())
    assert scaler.get_scale() == 2.0**16


def test_a_grad_scaler_takes_its_state_over(seed):
    model, x = mlp(), batch()
    scaler = hu.AdaptiveGradScaler(model, init_scale=2.0**7)
    reference = torch.amp.GradScaler("cpu")
    reference.load_state_dict(scaler.state_dict())
    assert reference.get_scale() == 2.0**7
    loss = mean_square(model(x))
    assert torch.equal(reference.scale(loss), loss * 2.0**7)


def step_once(model, scaler):
    clear(model)
    scaler.scale(mean_square(model(batch()))).backward()
    scaler.step(torch.optim.SGD(model.parameters(), lr=0.1))
    scaler.update()


@pytest.mark.parametrize("known", [True, False])
def test_a_state_of_another_model_is_refused(known, seed):
    small, large = mlp(2), mlp(4)
    scalers = [hu.AdaptiveGradScaler(model) for model in (small, large)]
    step_once(large, scalers[1])
    other = scalers[1].state_dict()
    if known:
        step_once(small, scalers[0])
    with pytest.raises(ValueError, match=r"another model.*unknown '4', '6'\."):
        scalers[0].load_state_dict(other)
    assert "4" not in sites(scalers[0])


@pytest.mark.parametrize(("saved", "loaded"), [("amax", "dynamic"), ("dynamic", "amax"), ("amax", "measured")])
def test_a_policy_may_be_another_than_the_one_of_the_state(saved, loaded, seed):
    before, after = mlp(), mlp()
    scaler = hu.AdaptiveGradScaler(before, policy=saved, format="e5m2", interval=2, init_scale=2.0**10)
    step_once(before, scaler)
    other = hu.AdaptiveGradScaler(after, policy=loaded, format="e5m2", interval=2)
    other.load_state_dict(scaler.state_dict())
    assert other.get_scale() == scaler.get_scale()
    merged = {row.merged for row in other.sites() if row.site != "global"}
    assert merged == ({None} if loaded == "amax" else {"one scale for all"})
    for _ in range(3):
        step_once(after, other)
    assert other.last_step.applied
    assert (len({row.exponent for row in other.sites()}) > 1) is (loaded == "amax")


def test_one_scale_for_all_goes_on_where_a_part_did_not_run_since(seed):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x, both=True):
            return self.first(x) + self.last(x) if both else self.first(x)

    def step(model, scaler, both):
        clear(model)
        scaler.scale(mean_square(model(torch.randn(3, 4), both))).backward()
        scaler.step(torch.optim.SGD(model.parameters(), lr=0.01))
        scaler.update()

    model, policy = Two(), Measured(headroom=8)
    saved = hu.AdaptiveGradScaler(model, policy=policy, format="e5m2", interval=1)
    for _ in range(4):
        step(model, saved, both=True)
    model = Two()
    scaler = hu.AdaptiveGradScaler(model, policy=policy, format="e5m2", interval=1)
    scaler.load_state_dict(saved.state_dict())
    for both in (False, False, True):
        step(model, scaler, both)
    assert scaler.last_step.applied


@pytest.mark.parametrize("format", ["e3m4", None])
def test_a_resumed_scaler_knows_what_stores_gradients(format, seed):
    """A fall depends on the format's binades, and what is wide is spared where an overflow passed by."""

    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.wide, self.last = (nn.Linear(8, 8) for _ in range(3))
            self.spiked = Spiked()

        def forward(self, x):
            x = self.first(x).tanh()
            with torch.autocast("cpu", enabled=False):
                x = self.wide(x.float()).tanh()
            return self.spiked(self.last(x))

    def step(model, scaler, factor):
        clear(model)
        model.spiked.spike = factor
        with torch.autocast("cpu", torch.float16, enabled=format is None):
            out = model(torch.ones(4, 8))
        scaler.scale(mean_square(out.float())).backward()
        scaler.step(torch.optim.SGD(model.parameters(), lr=0.0))
        scaler.update()

    model = Mixed()
    scaler = hu.AdaptiveGradScaler(model, format=format)
    for _ in range(15):
        step(model, scaler, 1.0)
    copy = Mixed()
    copy.load_state_dict(model.state_dict())
    resumed = hu.AdaptiveGradScaler(copy, format=format)
    resumed.load_state_dict(scaler.state_dict())
    for factor in (2.0**24, 2.0**24, 1.0):
        step(model, scaler, factor)
        step(copy, resumed, factor)
        assert sites(scaler) == sites(resumed)
    assert sum(row.overflows for row in scaler.sites()) > 0


def test_bounds_and_options_stay_the_scalers(seed):
    before, after = mlp(), mlp()
    saved = hu.AdaptiveGradScaler(before, format="e5m2")
    step_once(before, saved)
    saved.set_exponents({"global": 50, "0": 55, "2": -25, "4": 50})
    for policy in (Dynamic(growth_interval=100), "amax"):
        scaler = hu.AdaptiveGradScaler(after, policy=policy, format="e5m2", init_scale=1.0, floor=-10, ceiling=20)
        scaler.load_state_dict(saved.state_dict())
        assert scaler.get_scale() == 2.0**20
        assert all(-10 <= row.exponent <= 20 for row in scaler.sites())
        assert scaler.state_dict()["growth_interval"] == (2000 if policy == "amax" else 100)
        scaler.detach()


def test_missing_sites_are_named(seed):
    small, large = mlp(2), mlp(4)
    ours, theirs = hu.AdaptiveGradScaler(small), hu.AdaptiveGradScaler(large)
    step_once(small, ours)
    step_once(large, theirs)
    with pytest.raises(ValueError, match=r"another model.*lacks '4', '6'\."):
        theirs.load_state_dict(ours.state_dict())


def test_distributed_data_parallel_is_looked_through(process_group, seed):
    model, x = mlp(), batch()
    mean_square(model(x)).backward()
    wanted = [p.grad.clone() for p in model.parameters()]
    clear(model)
    wrapped = nn.parallel.DistributedDataParallel(model)
    scaler = hu.AdaptiveGradScaler(wrapped)
    for _ in range(3):
        clear(model)
        scaler.scale(mean_square(wrapped(x))).backward()
        assert all(torch.equal(p.grad / scaler.get_scale(), g) for p, g in zip(model.parameters(), wanted))
        scramble(scaler)
        scaler._controller.backward.end_iteration()
    assert set(scaler._controller.sites) == {"global", "0", "2", "4"}


def test_accelerate_takes_the_scaler(seed):
    accelerate = pytest.importorskip("accelerate")
    model, x = mlp(), batch()
    accelerator = accelerate.Accelerator(cpu=True)
    scaler = accelerator.scaler = hu.AdaptiveGradScaler(model)
    opt = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    opt.scaler = scaler
    before = state(model)
    accelerator.backward(mean_square(model(x)))
    opt.step()
    assert scaler.last_step.applied
    assert not torch.equal(model[0].weight, before["0.weight"])


READS = ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__")


@pytest.fixture
def reads(monkeypatch):
    """The names of the calls that would wait for a device, where numbers are on one."""
    monkeypatch.setattr(_powers, "is_on_host", lambda tensor: False)
    found = []
    for name in READS:
        original = getattr(torch.Tensor, name)

        def counted(self, *args, _name=name, _original=original, **kwargs):
            found.append(_name)
            return _original(self, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, counted)
    return found


@pytest.mark.parametrize("measured", [False, True])
def test_one_read_per_step(reads, seed, measured):
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 3))
    scaler = hu.AdaptiveGradScaler(model, interval=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.randn(5, 6)
    steps = 5 if measured else 6
    for _ in range(steps):
        reads.clear()
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.last_step.applied
    assert reads == ["tolist"]


@pytest.mark.parametrize("factor", [2.0**60, 1.0], ids=["within the model", "outside"])
def test_a_skipped_step_reads_no_more_for_more_layers(reads, seed, factor):
    """The flags, and whether losses are finite."""
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(9)))
    scaler = hu.AdaptiveGradScaler(model, format="fp16")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler.scale(model(torch.randn(5, 6)).square().mean() * factor).backward()
    if factor == 1.0:
        model[4].weight.grad.fill_(torch.inf)
    reads.clear()
    scaler.step(optimizer)
    assert not scaler.last_step.applied
    scaler.update()
    assert reads == ["tolist"] * 2


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk, self.left, self.right = mlp(2), mlp(1), mlp(2)

    def forward(self, x):
        h = self.trunk(x)
        return self.left(h), self.right(h)


def test_two_forward_passes_before_one_backward(seed):
    model, x, y = mlp(), batch(), batch()

    def run():
        return mean_square(model(x)) + mean_square(model(y) * model(x))

    wanted = plainly(seed, run, model)
    scaler = hu.AdaptiveGradScaler(model)
    assert_same(scrambled(seed, scaler, lambda: scaler.scale(run()).backward(), model), wanted)


def test_the_output_of_one_pass_is_the_input_of_the_next(seed):
    model, x = mlp(), batch()

    def run():
        return mean_square(model(model(x).tanh()))

    wanted = plainly(seed, run, model)
    scaler = hu.AdaptiveGradScaler(model)
    assert_same(scrambled(seed, scaler, lambda: scaler.scale(run()).backward(), model), wanted)


def test_accumulated_backward_passes(seed):
    model, batches = mlp(), [batch() for _ in range(3)]
    for x in batches:
        mean_square(model(x)).backward()
    wanted = gradients(model)
    clear(model)
    scaler = hu.AdaptiveGradScaler(model)

    def accumulate():
        for x in batches:
            scaler.scale(mean_square(model(x))).backward()

    assert_same(scrambled(seed, scaler, accumulate, model), wanted)


def test_exponents_that_change_between_forward_and_backward(seed):
    model, x = mlp(), batch()
    wanted = plainly(seed, lambda: mean_square(model(x)), model)
    scaler = hu.AdaptiveGradScaler(model)
    mean_square(model(x))
    scramble(scaler)
    output = mean_square(model(x))
    scramble(scaler)
    scaler.scale(output).backward()
    assert_same({key: g / scaler.get_scale() for key, g in gradients(model).items()}, wanted)


@pytest.mark.parametrize("collect", [list, tuple])
def test_several_losses_in_one_call(collect, seed):
    model, x = Heads(), batch()

    def losses():
        left, right = model(x)
        return collect([mean_square(left), 100 * mean_square(right)])

    sum(losses()).backward()
    wanted = gradients(model)
    clear(model)
    scaler = hu.AdaptiveGradScaler(model)

    def run():
        scaled = scaler.scale(losses())
        assert type(scaled) is collect
        sum(scaled).backward()

    assert_same(scrambled(seed, scaler, run, model), wanted)


def test_losses_are_differentiated_one_by_one(seed):
    model, x = Heads(), batch()

    def run(scale):
        left, right = model(x)
        scale(mean_square(left)).backward(retain_graph=True)
        scale(mean_square(right)).backward()

    run(lambda loss: loss)
    wanted = gradients(model)
    clear(model)
    scaler = hu.AdaptiveGradScaler(model)
    assert_same(scrambled(seed, scaler, lambda: run(scaler.scale), model), wanted)


def test_a_graph_that_is_kept_is_differentiated_twice(seed):
    model, x = mlp(), batch()
    wanted = {key: 2 * g for key, g in plainly(seed, lambda: mean_square(model(x)), model).items()}
    scaler = hu.AdaptiveGradScaler(model)

    def run():
        scaled = scaler.scale(mean_square(model(x)))
        scaled.backward(retain_graph=True)
        scaled.backward()

    assert_same(scrambled(seed, scaler, run, model), wanted)


def test_a_vector_of_losses_and_a_gradient_for_it(seed):
    model, x, weights = mlp(), batch(), torch.rand(4)
    model(x).square().mean(1).backward(weights)
    wanted = gradients(model)
    clear(model)
    scaler = hu.AdaptiveGradScaler(model)

    def run():
        scaler.scale(model(x).square().mean(1)).backward(weights)

    assert_same(scrambled(seed, scaler, run, model), wanted)


def test_several_models_in_one_scaler(seed):
    encoder, decoder, x = mlp(2), mlp(2), batch()

    def run():
        code = encoder(x)
        return mean_square(decoder(code) - x) + mean_square(code)

    wanted = plainly(seed, run, encoder, decoder)
    scaler = hu.AdaptiveGradScaler([encoder, decoder])
    found = scrambled(seed, scaler, lambda: scaler.scale(run()).backward(), encoder, decoder)
    assert set(scaler._controller.sites) == {"global", "0.0", "0.2", "1.0", "1.2"}
    assert_same(found, wanted)


def test_several_models_take_the_state_of_others_before_they_run(seed):
    saved, fresh = (hu.AdaptiveGradScaler(models) for models in ([mlp(2), mlp(2)], [mlp(2), mlp(2)]))
    encoder, decoder = (one() for one in saved._models)
    saved.scale(mean_square(decoder(encoder(batch())))).backward()
    saved.step(torch.optim.SGD([*encoder.parameters(), *decoder.parameters()], lr=0.1))
    saved.update()
    fresh.load_state_dict(saved.state_dict())
    assert fresh.state_dict() == saved.state_dict()


def test_a_gan_with_two_scalers(seed):
    maker, critic, z, real = mlp(), mlp(2), batch(), batch()

    def made():
        return -critic(maker(z)).mean()

    def judged():
        return critic(maker(z).detach()).mean() - critic(real).mean()

    wanted_of_maker = plainly(seed, made, maker)
    wanted_of_critic = plainly(seed, judged, critic)
    ours, theirs = (hu.AdaptiveGradScaler(model) for model in (maker, critic))
    theirs.scale(judged()).backward()
    scramble(theirs)
    assert_same(scrambled(seed, ours, lambda: ours.scale(made()).backward(), maker), wanted_of_maker)
    assert_same(scrambled(seed, theirs, lambda: theirs.scale(judged()).backward(), critic), wanted_of_critic)


def test_several_optimizers(seed):
    """Each has its own part of the model, and one alone skips where its part overflows."""
    model, x = Heads(), batch()
    parts = [model.trunk, model.left, model.right]
    scaler = hu.AdaptiveGradScaler(model)
    opts = [torch.optim.SGD(part.parameters(), lr=0.1) for part in parts]
    left, right = model(x)
    scaler.scale(mean_square(left) + mean_square(right)).backward()
    model.left[0].weight.grad[0, 0] = torch.inf
    before = [part[0].weight.detach().clone() for part in parts]
    applied = []
    for opt in opts:
        scaler.step(opt)
        applied.append(scaler.last_step.applied)
    scaler.update()
    assert applied == [True, False, True]
    changed = [not torch.equal(part[0].weight, old) for part, old in zip(parts, before)]
    assert changed == applied


def test_several_optimizers_step_as_with_grad_scaler(seed):
    model, x = Heads(), batch()
    start = {key: value.clone() for key, value in model.state_dict().items()}

    def train(make):
        model.load_state_dict(start)
        scaler = make()
        opts = [torch.optim.SGD(model.trunk.parameters(), lr=0.1), torch.optim.Adam(model.right.parameters())]
        for _ in range(4):
            clear(model)
            left, right = model(x)
            scaler.scale(mean_square(left) + mean_square(right)).backward()
            for opt in opts:
                scaler.step(opt)
            scaler.update()
        return {("p", key): value.clone() for key, value in model.state_dict().items()}

    wanted = train(lambda: torch.amp.GradScaler("cpu"))
    assert_same(train(lambda: hu.AdaptiveGradScaler(model)), wanted)


def exact_or_refused(model, run, seed, **options):
    """Gradients in mixed units are what must never be; a refusal is a ValueError or NotImplementedError."""
    wanted = plainly(seed, run, model)
    scaler = hu.AdaptiveGradScaler(model, **options)
    try:
        found = scrambled(seed, scaler, lambda: scaler.scale(run()).backward(), model)
    except (ValueError, NotImplementedError):
        return
    assert_same(found, wanted)


def test_a_penalty_on_the_weights_outside_the_model(seed):
    model, x = mlp(), batch()

    def run():
        return mean_square(model(x)) + sum(p.square().sum() for p in model.parameters())

    exact_or_refused(model, run, seed)


def test_a_head_outside_the_model_that_is_tied_to_its_embedding(seed):
    model = nn.Sequential(nn.Embedding(WIDTH, WIDTH), *mlp(2))
    ids = torch.arange(WIDTH)
    exact_or_refused(model, lambda: mean_square(model(ids) @ model[0].weight.t()), seed)


def test_a_part_that_is_called_on_its_own(seed):
    model, x = mlp(), batch()
    exact_or_refused(model, lambda: mean_square(model(x)) + mean_square(model[0](x)), seed)


def test_a_parameter_that_two_scalers_share(seed):
    shared = nn.Linear(WIDTH, WIDTH)
    one, two = nn.Sequential(*mlp(2), shared), nn.Sequential(shared, *mlp(2))
    x = batch()
    scaler = hu.AdaptiveGradScaler(two)
    scaler.scale(mean_square(two(x))).backward()
    scramble(scaler)
    exact_or_refused(one, lambda: mean_square(two(one(x))), seed)


SGD = torch.optim.SGD
KINDS = {
    "plain": lambda p: SGD(p, lr=0.1),
    "fused": lambda p: SGD(p, lr=0.1, fused=True),
    "own": lambda p: hu.optim.SGD(p, lr=0.1),
    "wrapped": lambda p: hu.optim.wrap(SGD, p, lr=0.1),
}


def clip(model):
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def pair(**options):
    """A model, its twin, and a scaler of the first."""
    model, twin = mlp(), mlp()
    twin.load_state_dict(model.state_dict())
    return model, twin, hu.AdaptiveGradScaler(model, **options)


def backward(model, x, scaler=None):
    loss = mean_square(model(x) - x)
    (loss if scaler is None else scaler.scale(loss)).backward()


def grads_of(model):
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def assert_equal(found, wanted):
    assert len(found) == len(wanted)
    assert all(a is b if a is None or b is None else same_bits(a, b) for a, b in zip(found, wanted))


def seen_by(optimizer, model, seen):
    """Record the gradients that an optimizer steps by."""
    optimizer.register_step_pre_hook(lambda *_: seen.append(grads_of(model)))
    return optimizer


@pytest.mark.parametrize("kind", KINDS)
def test_an_optimizer_that_shares_a_parameter_is_refused_before_it_divides_again(kind, seed):
    model, _, scaler = pair()
    first, second = KINDS[kind](model.parameters()), KINDS[kind](list(model.parameters())[2:])
    backward(model, batch(), scaler)
    scaler.step(first)
    before, gradients = [p.clone() for p in model.parameters()], grads_of(model)
    with pytest.raises(ValueError, match=r"two optimizers share a parameter, of shape .*give each parameter to one"):
        scaler.step(second)
    assert_equal(list(model.parameters()), before)
    assert_equal(grads_of(model), gradients)


def test_torch_divides_again_for_each(seed):
    # Why the scaler differs from it here.
    model = mlp()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizers = SGD(model.parameters(), lr=0.0), SGD(model.parameters(), lr=0.0)
    backward(model, batch(), scaler)
    scaler.step(optimizers[0])
    once = grads_of(model)
    scaler.step(optimizers[1])
    assert_equal(grads_of(model), [gradient / 1024 for gradient in once])


@pytest.mark.parametrize("clips", [True, False])
def test_a_loss_for_each_optimizer(clips, seed):
    model, twin, scaler = pair()
    seen, wanted = [], []
    optimizers = [seen_by(SGD(model.parameters(), lr=0.1), model, seen) for _ in range(2)]
    theirs = [seen_by(SGD(twin.parameters(), lr=0.1), twin, wanted) for _ in range(2)]
    for _ in range(2):
        for optimizer, other in zip(optimizers, theirs):
            x = batch()
            optimizer.zero_grad()
            other.zero_grad()
            backward(model, x, scaler)
            backward(twin, x)
            if clips:
                scaler.unscale_(optimizer)
                clip(model), clip(twin)
            scaler.step(optimizer)
            other.step()
        scaler.update()
    for one, other in zip(seen, wanted, strict=True):
        assert_equal(one, other)


LATER_PASS = r"a scaled backward pass ran after unscale_\(\).*call scaler\.update"


def test_each_optimizer_is_unscaled_once(seed):
    model, _, scaler = pair()
    parameters = list(model.parameters())
    first, second = SGD(parameters[:2], lr=0.1), SGD(parameters[2:], lr=0.1)
    backward(model, batch(), scaler)
    for optimizer in (first, second):
        scaler.unscale_(optimizer)
        with pytest.raises(RuntimeError, match=r"unscale_\(\) has already been called on this optimizer"):
            scaler.unscale_(optimizer)
    for optimizer in (first, second):
        scaler.step(optimizer)
        with pytest.raises(RuntimeError, match=r"step\(\) has already been called"):
            scaler.step(optimizer)
        with pytest.raises(RuntimeError, match=r"after step\(\)"):
            scaler.unscale_(optimizer)
    scaler.update()


def test_a_closure_is_refused_for_each(seed):
    model, _, scaler = pair()
    backward(model, batch(), scaler)
    scaler.step(SGD(model.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="a closure would be called without the scale"):
        scaler.step(SGD(model.parameters(), lr=0.1), closure=lambda: 0.0)


def test_gradients_are_not_kept_alive(seed):
    model, _, scaler = pair()
    optimizer = SGD(model.parameters(), lr=0.1)
    backward(model, batch(), scaler)
    scaler.step(optimizer)
    held = [weakref.ref(p.grad) for p in model.parameters()]
    assert all(one() is not None for one in held)
    optimizer.zero_grad()
    assert all(one() is None for one in held)
    scaler.update()


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("updates", [True, False])
def test_a_second_pass_after_unscaling_is_stepped_with_unscaled_or_refused(to_none, updates, seed):
    """As a sharpness-aware step has two: the first one's gradients, unscaled, say where the second is taken."""
    model, _, scaler = pair()
    x, optimizer = batch(), SGD(model.parameters(), lr=0.1)
    backward(model, x, scaler)
    scaler.unscale_(optimizer)
    first = grads_of(model)
    if updates:
        scaler.update()
    optimizer.zero_grad(set_to_none=to_none)
    backward(model, x, scaler)
    before = [p.detach().clone() for p in model.parameters()]
    if not updates:
        with pytest.raises(ValueError, match=LATER_PASS):
            scaler.step(optimizer)
        assert_equal(list(model.parameters()), before)
        return
    scaler.step(optimizer)
    assert_equal(grads_of(model), first)


@pytest.mark.parametrize("unscales", [False, True])
def test_gradients_of_an_iteration_that_has_ended_are_not_divided_by_the_scale_of_the_next(unscales):
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    scaler = hu.AdaptiveGradScaler(model)
    one, other = (torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model)
    scaler.scale(model(torch.ones(3, 4)).square().mean()).backward()
    if unscales:
        scaler.unscale_(other)
    scaler.step(one)
    scaler.update()
    scale = scaler.get_scale()  # as for a log
    with pytest.raises(ValueError, match=r"there is nothing to unscale.*Step all optimizers of one pass before"):
        scaler.step(other)
    for way in ("new memory", "a write", "another tensor"):
        scaler.get_scale()
        for parameter in model[1].parameters():
            if way == "new memory":
                parameter.grad.data = torch.full_like(parameter, scale)
            elif way == "a write":
                parameter.grad.fill_(scale)
            else:
                parameter.grad = torch.full_like(parameter, scale)
        before = model[1].bias.detach().clone()
        scaler.step(other)
        scaler.update(scale)
        assert torch.equal(model[1].bias, before - 0.1), way
