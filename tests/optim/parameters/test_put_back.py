"""Stored bits that are put back, by any path, are the weight that the optimizer left, once a first write was seen."""

import copy

import pytest
import torch

import halfulp as hu
from halfulp.optim.parameters import _outside_writes

from ...laws.optim.cases import UPDATES, differing, narrow_updates, snapshot

SIZE = 96
UPDATES_TRIED = [name for name in narrow_updates() if not UPDATES[name].feeds_back]


def _in_new_memory(weight):
    old = weight.data.clone()
    weight.add_(0.25)
    yield
    weight.data = old


def _copied(weight):
    old = weight.detach().clone()
    weight.mul_(1.5)
    yield
    weight.copy_(old)


def _added_and_copied_in_data(weight):
    old = weight.detach().clone()
    weight.data.add_(0.25)
    yield
    weight.data.copy_(old)


def _in_old_memory(weight):
    old = weight.data
    weight.data = old + 0.25
    yield
    weight.data = old


def _in_old_memory_written_meanwhile(weight):
    old, bits = weight.data, weight.detach().clone()
    weight.data = old + 0.25
    old.zero_()
    yield
    weight.data = bits


def _swapped(weight):
    other = torch.nn.Parameter(weight.detach() + 0.25)
    torch.utils.swap_tensors(weight, other)
    yield
    weight.add_(1.0)
    torch.utils.swap_tensors(weight, other)


def _swapped_with_a_copy(weight):
    other = torch.nn.Parameter(weight.detach().clone())
    weight.add_(0.25)
    yield
    torch.utils.swap_tensors(weight, other)


@pytest.fixture
def swaps():
    """torch's own switch, without which a parameter that an optimizer knows cannot be swapped."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


PATHS = {
    path.__name__.removeprefix("_"): path
    for path in (
        _in_new_memory,
        _copied,
        _added_and_copied_in_data,
        _in_old_memory,
        _in_old_memory_written_meanwhile,
        _swapped,
        _swapped_with_a_copy,
    )
}


def _run(update, path, at, engine="reference", steps=6, **options):
    generator = torch.Generator().manual_seed(7)
    weight = torch.nn.Parameter(torch.randn(SIZE, generator=generator))
    optimizer = hu.optim.AdamW([weight], lr=1e-3, weight_update=UPDATES[update], param_dtype=torch.bfloat16, **options)
    for step in range(steps):
        gradient = torch.randn(SIZE, generator=generator).bfloat16()
        away = path(weight) if path is not None and step in at else iter(())
        with torch.no_grad():
            next(away, None)
            next(away, None)
        weight.grad = gradient  # a swap would take it along
        with hu.kernels.engine(engine):
            optimizer.step()
    return optimizer


@pytest.mark.sampled(2)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("update", UPDATES_TRIED)
def test_an_excursion_changes_no_bit(swaps, update, path):
    first = snapshot(_run(update, PATHS[path], (0,)))
    for at in (range(6), (0, 4)):
        assert differing(first, snapshot(_run(update, PATHS[path], at))) == [], at


@pytest.mark.parametrize("update", ["split8", "split", "kahan", "master"])
def test_nor_under_the_compiled_step(swaps, update):
    for path in PATHS.values():
        first = snapshot(_run(update, path, (0,), "auto"))
        assert differing(first, snapshot(_run(update, path, range(6), "auto"))) == []


@pytest.mark.parametrize("update", ["split8", "split", "kahan", "master"])
def test_sharpness_aware_steps_move_as_far_as_float32(update):
    """Steps of a tenth of an ulp, each after a perturbation that is taken back, of two parameters."""
    moved = {}
    for dtype in (torch.float32, torch.bfloat16):
        weights = [torch.nn.Parameter(torch.full((64,), value).to(dtype)) for value in (1.0, 2.0)]
        given = {} if dtype == torch.float32 else {"weight_update": update}
        optimizer = hu.optim.AdamW(weights, lr=1e-4, weight_decay=0.0, **given)
        model = torch.nn.ParameterList(weights)
        for _ in range(60):
            for weight in weights:
                old = weight.data.clone()
                with torch.no_grad():
                    weight.add_(0.05)
                weight.grad = torch.ones_like(weight)
                weight.data = old
            with hu.kernels.engine("reference"):
                optimizer.step()
        held = optimizer.float32_state_dict(model)
        moved[dtype] = [float(held[name].mean()) - start for name, start in (("0", 1.0), ("1", 2.0))]
    for far, near in zip(moved[torch.float32], moved[torch.bfloat16]):
        assert abs(near / far - 1) < 0.05


def test_reading_during_an_excursion_shows_what_was_written_and_leaves_the_weight():
    weight = torch.nn.Parameter(torch.randn(SIZE))
    optimizer = hu.optim.SGD([("0", weight)], lr=1e-3, weight_update="split", param_dtype=torch.bfloat16)
    model = torch.nn.ParameterList([weight])
    weight.grad = torch.randn(SIZE).bfloat16()
    for _ in range(2):
        with torch.no_grad():
            weight.mul_(1.5)
        with hu.kernels.engine("reference"):
            optimizer.step()
    before = optimizer.float32_state_dict(model)["0"]
    old = weight.detach().clone()
    with torch.no_grad():
        weight.add_(1.0)
        assert torch.equal(optimizer.float32_state_dict(model)["0"], weight.detach().float())
        weight.data = old
    assert torch.equal(optimizer.float32_state_dict(model)["0"], before)


WRITES = {
    "clamp": lambda weight: weight.clamp_(-0.1, 0.1),
    "mask": lambda weight: weight[::3].zero_(),
    "projection": lambda weight: weight.mul_((1.0 / weight.float().norm()).clamp(max=1).bfloat16()),
    "new memory": lambda weight: setattr(weight, "data", weight.data.clamp(-0.1, 0.1)),
    "excursion and clamp": lambda weight: (weight.add_(1.0), weight.sub_(1.0), weight.clamp_(-0.1, 0.1)),
}


class _Training:
    """A bfloat16 model whose weights are written at every step, which files, copies and both come into."""

    def __init__(self, update, write, before):
        self.update, self.write, self.before = update, write, before
        torch.manual_seed(3)
        self.model = torch.nn.Linear(16, 8)
        self.optimizer = hu.optim.AdamW(
            self.model.named_parameters(), lr=1e-2, weight_update=UPDATES[update], param_dtype=torch.bfloat16
        )

    def step(self, number):
        generator = torch.Generator().manual_seed(number)
        for parameter in self.model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator).bfloat16()
        for act in (self._write, self._step) if self.before else (self._step, self._write):
            act()

    def _write(self):
        with torch.no_grad():
            self.write(self.model.weight)

    def _step(self):
        with hu.kernels.engine("reference"):
            self.optimizer.step()

    def resumed(self, model_first):
        new = _Training(self.update, self.write, self.before)
        pairs = [(new.model, self.model.state_dict()), (new.optimizer, self.optimizer.state_dict())]
        for target, file in pairs if model_first else reversed(pairs):
            target.load_state_dict(copy.deepcopy(file))
        return new


COMES = {
    "resumed, model first": lambda training: training.resumed(True),
    "resumed, optimizer first": lambda training: training.resumed(False),
    "deepcopy": copy.deepcopy,
    "read between": lambda training: training.optimizer.float32_state_dict(training.model) and training,
}


ORDERS = ("written before the step", "written after it")
# What sees no payload before that write, and so resets the companions of the whole parameter.
SEES_NO_PAYLOAD = {"resumed, optimizer first", "deepcopy"}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("at", [1, 3])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("update", UPDATES_TRIED)
def test_a_run_that_is_written_at_each_step_goes_on_from_a_file_or_a_copy(update, write, order, at):
    whole = _Training(update, WRITES[write], order == ORDERS[0])
    for number in range(5):
        if number == at:
            others = {name: come(copy.deepcopy(whole)) for name, come in COMES.items()}
        whole.step(number)
    for name, other in others.items():
        if order == ORDERS[0] and name in SEES_NO_PAYLOAD:
            continue
        for number in range(at, 5):
            other.step(number)
        assert differing(snapshot(whole.optimizer), snapshot(other.optimizer)) == [], name


@pytest.mark.parametrize("apart", [True, False], ids=["two groups", "one group"])
@pytest.mark.parametrize("update", ["split8", "split", "kahan", "master"])
def test_parameters_cut_from_one_tensor_keep_their_companions(update, apart):
    """They share a version counter: one whose gradient is missing sees the others' steps on it."""

    def run(whole):
        parts = [torch.nn.Parameter(part if whole else part.clone()) for part in start.clone().chunk(3)]
        groups = [{"params": [part]} for part in parts] if apart else parts
        optimizer = hu.optim.AdamW(groups, lr=1e-3, weight_update=update)
        generator = torch.Generator().manual_seed(1)
        for step in range(6):
            for number, part in enumerate(parts):
                gradient = torch.randn(part.shape, generator=generator).bfloat16()
                part.grad = None if number == step % 3 else gradient
            with hu.kernels.engine("reference"):
                optimizer.step()
        return snapshot(optimizer)

    start = torch.randn(12, 8).bfloat16()
    assert differing(run(True), run(False)) == []


def test_excursions_that_go_on_keep_the_copy_by_which_they_are_known(monkeypatch):
    monkeypatch.setattr(_outside_writes, "STEPS_WITH_COPY", 2)
    first = snapshot(_run("split", _copied, (0,), steps=10))
    assert differing(first, snapshot(_run("split", _copied, range(10), steps=10))) == []
