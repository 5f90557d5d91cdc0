"""Updates: what optimizers want beside what takes place; counts over parts of any length, of any numbers."""

import copy
import itertools
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import halfulp as hu
from halfulp.observation._record import RealisedChanges
from halfulp.observation.observing._updates import record_realised_changes

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.003, momentum=0.9, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-3, weight_decay=0.1, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.3),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, initial_accumulator_value=0.1),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.1),
    "adamax": lambda p: torch.optim.Adamax(p, lr=1e-3),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-3),
    "nadam-numpy": lambda p: torch.optim.NAdam(p, lr=1e-3, betas=(np.float32(0.9), 0.999)),
    "radam": lambda p: torch.optim.RAdam(p, lr=1e-3),
    "rprop": lambda p: torch.optim.Rprop(p, lr=1e-3),
    "asgd": lambda p: torch.optim.ASGD(p, lr=1e-3),
    "hu-adamw": lambda p: hu.optim.AdamW(p, lr=1e-3, weight_decay=0.1, weight_update="nearest"),
    "hu-sgd": lambda p: hu.optim.SGD(p, lr=0.003, momentum=0.9, weight_decay=0.01, weight_update="nearest"),
}


def model_of(dtype: torch.dtype) -> nn.Module:
    return nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 7)).to(dtype)


def step(model, optimizer, x) -> None:
    model(x).float().square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_wanted_updates_are_those_of_a_float64_twin(seed, name):
    model = model_of(torch.bfloat16)
    optimizer = OPTIMIZERS[name](model.parameters())
    x = torch.randn(5, 12, dtype=torch.bfloat16)
    with hu.observe(model, optimizer, interval=1) as seen:
        for _ in range(3):
            step(model, optimizer, x)
        before = {key: parameter.detach().double() for key, parameter in model.named_parameters()}
        counts = copy.deepcopy({key: record.update for key, record in seen.record.parameters.items()})
        twin = model_of(torch.float64)
        twin.load_state_dict({key: value.double() for key, value in model.state_dict().items()})
        other = OPTIMIZERS[name.replace("hu-", "")](twin.parameters())
        for mine, its in zip(model.parameters(), twin.parameters()):
            state = dict(optimizer.state[mine])
            other.state[its] = {
                key: torch.tensor(float(value)) if key == "step" else value.double() if value.dim() else value.clone()
                for key, value in ((k, torch.as_tensor(v)) for k, v in state.items())
            }
        model(x).float().square().sum().backward()
        for mine, its in zip(model.parameters(), twin.parameters()):
            its.grad = mine.grad.double()
        other.step()
        optimizer.step()
    for (key, mine), its in zip(model.named_parameters(), twin.parameters()):
        wanted = its.detach() - before[key]
        found, old = seen.record.parameters[key].update, counts[key]
        asked = wanted != 0
        assert found.known
        assert found.seen - old.seen == int(asked.sum())
        lost = int((asked & (mine.detach().double() == before[key])).sum())
        assert found.cancelled - old.cancelled == lost
        change = mine.detach().double() - before[key]
        assert found.wanted - old.wanted == int(asked.sum())
        share = float((wanted * change).sum()) / float((wanted**2).sum())
        assert found.kept - old.kept == pytest.approx(int(asked.sum()) * share, rel=1e-3, abs=1e-9)


def test_weights_of_one_lose_their_updates_and_their_decay():
    weight = nn.Parameter(torch.ones(1000, dtype=torch.bfloat16))
    model = nn.Module()
    model.weight = weight
    optimizer = torch.optim.AdamW([weight], lr=6e-4, weight_decay=0.1)
    with hu.observe(model, optimizer, interval=5) as seen:
        for _ in range(20):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
    record = seen.record.parameters["weight"]
    assert record.update.lost_share == 1.0
    assert record.update.realised_share == 0.0
    assert record.decay.lost_share == 1.0
    assert record.moved == 0.0
    assert record.states["exp_avg"].seen == 4 * 1000
    assert record.states["exp_avg_sq"].seen == 0  # it only grows


def test_of_averages_of_squares_decreases_count():
    for dtype, lost in ((torch.bfloat16, 1.0), (torch.float32, 0.0)):
        weight = nn.Parameter(torch.ones(1000, dtype=dtype))
        model = nn.Module()
        model.weight = weight
        optimizer = torch.optim.AdamW([weight], lr=1e-3)
        with hu.observe(model, optimizer, interval=1) as seen:
            for size in (1.0, 1.0, 0.01, 0.01):
                weight.grad = torch.full_like(weight, size)
                optimizer.step()
        record = seen.record.parameters["weight"].states["exp_avg_sq"]
        assert (record.seen, record.lost_share) == (2 * 1000, lost)


@pytest.mark.parametrize("update", ["kahan", "stochastic", "split"])
def test_halfulps_weight_updates_lose_nothing(seed, update):
    model = model_of(torch.bfloat16)
    optimizer = hu.optim.AdamW(model.parameters(), lr=3e-4, weight_update=update)
    with hu.observe(model, optimizer, interval=1) as seen:
        for _ in range(30):
            step(model, optimizer, torch.randn(5, 12, dtype=torch.bfloat16))
    for record in seen.record.parameters.values():
        assert record.weight_update == update
        assert record.update.known
        assert (record.rounding is not None) == (update == "stochastic")
    kept, wanted = (
        sum(getattr(one.update, name) for one in seen.record.parameters.values()) for name in ("kept", "wanted")
    )
    # Noise of stochastic rounding: sqrt(ulp / update / elements), here 1%.
    assert abs(kept / wanted - 1) < (0.1 if update == "stochastic" else 0.01)


def test_directions_of_stochastic_rounding(seed):
    model = nn.Linear(60, 50, bias=False).bfloat16()
    optimizer = hu.optim.SGD(model.parameters(), lr=1e-3, weight_update="stochastic")
    with hu.observe(model, optimizer, interval=1) as seen:
        for _ in range(40):
            step(model, optimizer, torch.randn(8, 60, dtype=torch.bfloat16))
    rounding = seen.record.parameters["weight"].rounding
    assert rounding.seen > 50_000
    assert abs(rounding.excess) < 5 * rounding.variance**0.5
    assert abs(rounding.repeated) < 0.2


def test_states_are_in_the_optimizers_order():
    weight = torch.nn.Parameter(torch.ones(8))
    opt = torch.optim.Adam([weight], amsgrad=True)
    weight.grad = torch.ones(8)
    opt.step()
    with hu.observe(torch.nn.ParameterDict({"weight": weight}), opt, interval=1) as seen:
        opt.step()
    (record,) = seen.record.parameters.values()
    assert [*record.states] == ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"]


def test_an_unknown_optimizer_counts_unchanged_elements():
    class Odd(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.view(-1)[::2] -= group["lr"] * parameter.grad.view(-1)[::2]

    model = nn.Linear(8, 4, bias=False)
    optimizer = Odd(model.parameters(), lr=0.1)
    with hu.observe(model, optimizer, interval=1) as seen:
        step(model, optimizer, torch.ones(2, 8))
    update = seen.record.parameters["weight"].update
    assert (update.known, update.seen, update.cancelled, update.realised_share) == (False, 32, 16, None)


def test_a_registered_class_is_run_on_shadows():
    class Mine(torch.optim.SGD):
        pass

    model = nn.Linear(8, 4, bias=False)
    try:
        hu.observation.register_elementwise(Mine)
        optimizer = Mine(model.parameters(), lr=0.1)
        with hu.observe(model, optimizer, interval=1) as seen:
            step(model, optimizer, torch.ones(2, 8))
        assert seen.record.parameters["weight"].update.known
    finally:
        from halfulp.observation.observing._updates import DECOUPLES_DECAY_BY_OPTIMIZER_CLASS

        del DECOUPLES_DECAY_BY_OPTIMIZER_CLASS[Mine]
    with pytest.raises(TypeError, match="subclass of"):
        hu.observation.register_elementwise(nn.Linear)


def test_accumulation_in_a_narrow_type_is_swamped():
    weight = nn.Parameter(torch.ones(100, dtype=torch.bfloat16))
    model = nn.Module()
    model.weight = weight
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with hu.observe(model, optimizer, interval=1) as seen:
        for _ in range(600):
            (weight.float() * 0.01).sum().backward()
        optimizer.step()
    found = seen.record.parameters["weight"].accumulation
    assert found.seen == 599 * 100
    assert found.lost_share > 0.1
    assert found.realised_share < 0.8
    with hu.observe(model, optimizer, interval=1) as healthy:
        for _ in range(3):
            optimizer.zero_grad(set_to_none=False)
            weight.float().sum().backward()
            optimizer.step()
    assert healthy.record.parameters["weight"].accumulation is None


@pytest.mark.filterwarnings("ignore:AveragedModel keeps:RuntimeWarning")
def test_averages_of_weights(seed):
    for dtype, stuck in ((torch.bfloat16, True), (torch.float32, False)):
        model = nn.Linear(20, 10).to(dtype)
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999))
        average.update_parameters(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with hu.observe(model, optimizer, interval=1, average=average) as seen:
            for _ in range(10):
                step(model, optimizer, torch.randn(4, 20, dtype=dtype))
                average.update_parameters(model)
        record = seen.record.averages["average.weight"]
        assert (record.change.lost_share > 0.5) == stuck
        assert record.change.known
    ema = hu.optim.EMA(model.bfloat16(), 0.999)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with hu.observe(model, optimizer, interval=1, average=ema) as seen:
        for _ in range(10):
            step(model, optimizer, torch.randn(4, 20, dtype=torch.bfloat16))
            ema.update()
    assert seen.record.averages["average.weight"].change.realised_share == pytest.approx(1, abs=0.05)


LENGTHS = (0, 1, 7, 8, 9, 16, 37, 4096)


def odd_values(count: int) -> torch.Tensor:
    x = torch.randn(count, dtype=torch.float64)
    for value in (0.0, -0.0, math.inf, -math.inf, math.nan, 1e-310, 1e300):
        x[torch.randint(count, (count // 40,))] = value
    return x


def expected(b: np.ndarray, a: np.ndarray, w: np.ndarray, decreases: bool) -> RealisedChanges:
    """Element by element in plain Python."""
    seen = cancelled = 0
    square = kept = 0.0
    for before, after, wanted in zip(b.tolist(), a.tolist(), w.tolist()):
        change = after - before
        if wanted and math.isfinite(wanted) and math.isfinite(change) and not (decreases and wanted > 0):
            seen += 1
            cancelled += before == after and math.copysign(1, before) == math.copysign(1, after)
            square += wanted * wanted
            kept += wanted * change
    share = kept / square if square else 0.0
    return RealisedChanges(seen, cancelled, seen if square else 0, seen * share)


@pytest.mark.parametrize("decreases", [False, True])
def test_counts_are_those_of_each_element(seed, decreases):
    ends = np.cumsum([0, *LENGTHS])
    before, wanted = odd_values(int(ends[-1])), odd_values(int(ends[-1])) * 1e-3
    after = torch.where(torch.rand(len(before)) < 0.3, before, before + wanted * torch.randn(len(before)))
    for start, end in itertools.pairwise(ends):
        record, own = RealisedChanges(), [x[start:end] for x in (before, after, wanted)]
        record_realised_changes(record, *own, decreases_only=decreases)
        right = expected(*(x.numpy() for x in own), decreases)
        assert (record.seen, record.cancelled, record.wanted) == (right.seen, right.cancelled, right.wanted)
        assert math.isclose(record.kept, right.kept, rel_tol=1e-9, abs_tol=1e-12) or not math.isfinite(right.kept)


def test_parameters_that_an_optimizer_gets_while_it_is_observed_are_its_own(seed):
    model = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 1)).bfloat16()
    optimizer = torch.optim.SGD(model[1].parameters(), lr=1e-7)
    stranger = nn.Parameter(torch.ones(3))
    with hu.observe(model, optimizer, interval=1) as seen:
        for step in range(6):
            if step == 2:
                optimizer.add_param_group({"params": list(model[0].parameters())})
            if step == 4:
                optimizer.add_param_group({"params": [stranger]})
                assert not seen.record.unseen
            model(torch.randn(4, 8).bfloat16()).float().square().mean().backward()
            optimizer.step()
    assert {record.optimizer for record in seen.record.parameters.values()} == {"SGD"}
    lost = {name for finding in seen.findings for name in finding.where if finding.code == "updates-lost"}
    assert {"0.weight", "1.weight"} <= lost
    assert "never-stepped" not in [finding.code for finding in seen.findings]
    assert [said for said in seen.record.unseen if "got parameters after" in said]


class Clipped(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.clamp_(-1, 1)
        return super().step(closure)


@pytest.mark.parametrize("called", [False, True], ids=["loop", "closure"])
def test_a_step_that_calls_its_base_class_is_one_step(seed, called):
    model = nn.Linear(4, 1)
    torch.optim.SGD(model.parameters(), lr=0.1)  # from here on torch runs the hooks in its step, too
    optimizer = Clipped(model.parameters(), lr=0.1)

    def compute():
        optimizer.zero_grad()
        loss = model(torch.ones(3, 4)).sum()
        loss.backward()
        return loss

    compute()
    with hu.observe(model, optimizer, interval=2) as seen:
        for _ in range(6):
            optimizer.step(compute if called else None)
    assert (len(seen), seen.record.sampled_steps) == (6, [0, 2, 4])
    weight = seen.record.parameters["weight"]
    assert (weight.update.seen, weight.gradients) == (3 * 4, 3)


class Moving(torch.optim.SGD):
    """Moves the weights before its base class's step, whose updates are lost, or behind it."""

    first = True

    @torch.no_grad()
    def step(self, closure=None):
        if not self.first:
            super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(0.05 * parameter.grad.sign())
        if self.first:
            super().step(closure)


@pytest.mark.parametrize("first", [True, False], ids=["first", "last"])
def test_what_a_subclass_moves_around_its_base_class_is_part_of_its_step(seed, first):
    model = nn.Linear(32, 32).bfloat16()
    torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = Moving(model.parameters(), lr=1e-6)
    optimizer.first = first
    with hu.observe(model, optimizer, interval=1) as seen:
        for _ in range(6):
            optimizer.zero_grad()
            model(torch.randn(8, 32).bfloat16()).float().square().mean().backward()
            optimizer.step()
    weight = seen.record.parameters["weight"]
    assert (weight.gradients, weight.update.cancelled) == (6, 0)
