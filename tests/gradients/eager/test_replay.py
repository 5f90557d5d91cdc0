"""Forward passes without a region, once their graph is known: the same bits, sites and refusals as with one."""

import copy

import pytest
import torch

import halfulp as hu
from halfulp.gradients.eager import _attach, _replay
from halfulp.gradients.eager._attach import WatchedForward
from halfulp.gradients.eager._replay import compute_graph_shape_and_nodes

from ...samples import drawn
from ..exponents import ALL, WIDTH, assert_same, batch, case_of, clear, gradients, mean_square, plainly, scramble

# The siamese one reads tensors twice in one call.
HALF = ["multilayer-perceptron", "hf-gpt2", "hf-llama", "lstm-cell", "siamese"]
# Custom Functions, writes into views, and parameters that a module writes itself stay with regions.


def unmeasured(scaler, run, model):
    """One backward pass of an iteration that is not measured."""
    clear(model)
    backward = scaler._controller.backward
    backward.end_iteration()
    backward.is_measuring = False
    scaler.scale(run()).backward()


def replayed(scaler):
    """Whether the last forward pass had no region."""
    return bool(_replay.count_replays(scaler))


@pytest.mark.parametrize("name", drawn(ALL, 36, "replay"))
def test_random_exponents_change_no_bit(name, seed):
    case = case_of(name, seed)
    wanted = plainly(seed, case.run, case.model)
    scaler, orders = hu.AdaptiveGradScaler(case.model), []
    for _ in range(5):
        torch.manual_seed(seed)
        unmeasured(scaler, case.run, case.model)
        assert_same(
            {key: gradient * (1 / scaler.get_scale()) for key, gradient in gradients(case.model).items()}, wanted
        )
        orders.append(list(scaler._controller.backward.reached_sites))
        scramble(scaler)
    assert orders[-1] == orders[-2]


class Grows(torch.nn.Module):
    """A model that calls its layer so often, whose features a loss may read."""

    def __init__(self):
        super().__init__()
        self.first, self.layer, self.last = (torch.nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.calls, self.features = 1, None

    def forward(self, x):
        x = self.first(x)
        for _ in range(self.calls):
            x = x + torch.tanh(self.layer(x))
        self.features = x
        return self.last(x)


def exact(scaler, run, model, seed):
    """One forward pass of the model, by the scaler, beside one of a copy."""
    if isinstance(model, Grows):
        model.features = None
    plain = copy.deepcopy(model)
    wanted = plainly(seed, lambda: run(plain), plain)
    torch.manual_seed(seed)
    unmeasured(scaler, lambda: run(model), model)
    assert_same({key: gradient * (1 / scaler.get_scale()) for key, gradient in gradients(model).items()}, wanted)


def watch_regions(monkeypatch):
    seen = []
    enter = _attach.Region.__enter__
    monkeypatch.setattr(_attach.Region, "__enter__", lambda self: (seen.append(self), enter(self))[1])
    return seen


def prepared(seed, **options):
    """A model whose graph is known, under random exponents."""
    torch.manual_seed(seed)
    model, x = Grows(), batch()
    scaler = hu.AdaptiveGradScaler(model, **options)
    for _ in range(3):
        unmeasured(scaler, lambda: mean_square(model(x)), model)
    scramble(scaler)
    return model, x, scaler


def test_regions_see_measured_iterations_only_once_the_graph_is_known(seed, monkeypatch):
    model, x, scaler = prepared(seed)
    seen = watch_regions(monkeypatch)
    for _ in range(3):
        exact(scaler, lambda model: mean_square(model(x)), model, seed)
    assert not seen
    clear(model)
    scaler._controller.backward.end_iteration()
    scaler._controller.backward.is_measuring = True
    scaler.scale(mean_square(model(x))).backward()
    assert len(seen) == 1
    assert scaler._controller.backward.measurements.unread_statistics


def test_a_graph_that_was_not_expected_has_right_gradients_and_is_learned(seed, monkeypatch):
    model, x, scaler = prepared(seed)
    seen = watch_regions(monkeypatch)
    model.calls = 2
    for wanted in (0, 1, 2, 3, 3):
        exact(scaler, lambda model: mean_square(model(x)), model, seed)
        assert len(seen) == wanted
    assert "layer#1" in scaler._controller.sites


def test_a_graph_that_is_new_each_time_is_seen_by_regions(seed, monkeypatch):
    model, x, scaler = prepared(seed)
    seen = watch_regions(monkeypatch)
    for calls in range(2, 30):
        model.calls = calls
        exact(scaler, lambda model: mean_square(model(x)), model, seed)
    assert len(seen) == 27


def test_parameters_that_are_frozen_and_freed_are_exact(seed):
    model, x, scaler = prepared(seed)
    for frozen in (True, False, True, False):
        model.layer.requires_grad_(not frozen)
        for _ in range(3):
            exact(scaler, lambda model: mean_square(model(x)), model, seed)


def test_what_a_loss_reads_besides_the_output_has_one_scale_and_is_refused_the_next_time(seed):
    model, x, scaler = prepared(seed)

    def run(model):
        return mean_square(model(x)) + mean_square(model.features)

    exact(scaler, run, model, seed)
    assert scaler._controller.backward.uses_one_scale
    with pytest.raises(ValueError, match="is read outside"):
        unmeasured(scaler, lambda: run(model), model)


def test_a_loss_that_reads_the_inside_of_the_first_of_many_forward_passes_has_one_scale(seed):
    model, x, scaler = prepared(seed)

    def run(model):
        total, features = mean_square(model(x)), model.features
        for _ in range(80):
            total = total + mean_square(model(x))
        return total + mean_square(features)

    exact(scaler, run, model, seed)
    assert scaler._controller.backward.uses_one_scale


@pytest.mark.parametrize("measured", [False, True])
def test_features_of_an_earlier_forward_pass_that_the_next_one_reads(measured, seed):
    model, x, scaler = prepared(seed)
    backward = scaler._controller.backward

    def run(model):
        backward.is_measuring = measured
        model(x)
        backward.is_measuring = False
        return mean_square(model(model.features))

    exact(scaler, run, model, seed)
    assert backward.uses_one_scale
    exact(scaler, run, model, seed)
    assert not backward.uses_one_scale


def test_other_backward_passes_see_true_gradients(seed):
    model, x, scaler = prepared(seed)
    wanted = plainly(seed, lambda: mean_square(model(x)), model)
    loss = mean_square(model(x))
    assert replayed(scaler)
    loss.backward(retain_graph=True)
    assert_same(gradients(model), wanted)
    clear(model)
    scaler.scale(loss).backward()
    assert_same({key: gradient * (1 / scaler.get_scale()) for key, gradient in gradients(model).items()}, wanted)


@pytest.mark.filterwarnings("ignore:gradients are taken with create_graph")
def test_derivatives_of_derivatives_have_one_scale(seed):
    model, x, scaler = prepared(seed)
    x.requires_grad_()

    def penalty(scale=lambda loss: loss):
        (slope,) = torch.autograd.grad(scale(mean_square(model(x))), x, create_graph=True)
        return slope

    clear(model)
    mean_square(penalty()).backward()
    wanted = gradients(model)
    for _ in range(4):
        clear(model)
        scaler._controller.backward.end_iteration()
        scaler._controller.backward.is_measuring = False
        mean_square(penalty(scaler.scale) / scaler.get_scale()).backward()
        assert_same(gradients(model), wanted)


def test_exponents_that_change_between_forward_and_backward(seed):
    model, x, scaler = prepared(seed)
    wanted = plainly(seed, lambda: mean_square(model(x)), model)
    loss = mean_square(model(x))
    scramble(scaler)
    scaler.scale(loss).backward()
    assert_same({key: gradient * (1 / scaler.get_scale()) for key, gradient in gradients(model).items()}, wanted)


@pytest.mark.parametrize("name", HALF)
def test_a_replay_rounds_as_a_region_does(name, seed):
    """Under autocast to float16, by exponents that round differently."""
    case = case_of(name, seed)
    scaler = hu.AdaptiveGradScaler(case.model, float32_outputs=False)
    for _ in range(3):
        unmeasured(scaler, halved(case.run, seed), case.model)
    scramble(scaler, 6, 12)
    assert_rounds_as_a_region(scaler, halved(case.run, seed), case.model)


class ByNumber(torch.nn.Module):
    """Reads a number that a product made by two functions, which do not save it."""

    def __init__(self):
        super().__init__()
        self.first, self.last = (torch.nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x):
        x = self.first(x)
        number = torch.dot(x[0], x[1])
        return self.last(x + number) + number


def test_sums_in_16_bits_keep_their_region(seed):
    """The gradients of a number's readers, which a region sums in float16 before it moves them."""
    model, x = ByNumber(), batch()
    scaler = hu.AdaptiveGradScaler(model, float32_outputs=False)
    for _ in range(5):
        unmeasured(scaler, halved(lambda: mean_square(model(x)), seed), model)
        assert not replayed(scaler)
    scaler.detach()
    scaler = hu.AdaptiveGradScaler(model)
    for _ in range(5):
        unmeasured(scaler, lambda: mean_square(model(x)), model)
    assert replayed(scaler)


def halved(run, seed):
    """The same, seeded, under autocast to float16."""

    def run_halved():
        torch.manual_seed(seed)
        with torch.autocast("cpu", torch.float16):
            return run()

    return run_halved


def assert_rounds_as_a_region(scaler, run, model):
    """One backward pass without a region has the bits of one with a region."""
    before = _replay.count_replays(scaler)
    unmeasured(scaler, run, model)
    found = gradients(model)
    assert _replay.count_replays(scaler) > before
    assert not scaler._controller.backward.uses_one_scale
    for forward in scaler_forwards(model):
        forward._replay._known_graphs_in_row = 0
    unmeasured(scaler, run, model)
    assert_same(found, gradients(model))


class Routed(torch.nn.Module):
    """Two experts, of which either comes first: the graph's shape is the same."""

    def __init__(self):
        super().__init__()
        self.experts = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.first = 0

    def forward(self, x):
        return self.experts[1 - self.first](torch.tanh(self.experts[self.first](x)))


def test_parts_that_change_places_keep_their_sites(seed):
    torch.manual_seed(seed)
    model, x = Routed(), batch()
    run, scaler = halved(lambda: mean_square(model(x)), seed), hu.AdaptiveGradScaler(model)
    for first in (0, 1):
        model.first = first
        for _ in range(3):
            unmeasured(scaler, run, model)
    scramble(scaler, 6, 12)
    scaler.set_exponents({"experts.0": 14, "experts.1": -8, "global": 6})
    for first in (0, 1, 0):
        model.first = first
        for forward in scaler_forwards(model):
            forward._replay._known_graphs_in_row = 4
        assert_rounds_as_a_region(scaler, run, model)


def test_several_forward_passes_under_one_autocast_keep_their_sites(seed):
    model, x, scaler = prepared(seed)
    run = halved(lambda: mean_square(model(x)) + mean_square(model(2 * x)), seed)
    for _ in range(3):
        unmeasured(scaler, run, model)
    scramble(scaler, 6, 12)
    assert_rounds_as_a_region(scaler, run, model)


def test_a_graph_that_begins_outside_or_not(seed):
    model, x, scaler = prepared(seed)
    for run in (lambda model: mean_square(model(model(x))), lambda model: mean_square(model(x))):
        for _ in range(6):
            exact(scaler, run, model, seed)
    assert replayed(scaler)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_that_come_and_go(reentrant, seed):
    case = case_of(f"checkpoint-{'' if reentrant else 'non-'}reentrant", seed)
    model, scaler = case.model, hu.AdaptiveGradScaler(case.model)

    def run(model):
        return case.loss(model(*case.batch))

    for on in (True, False, True):
        model.checkpointed = on
        for _ in range(4):
            exact(scaler, run, model, seed)
            scramble(scaler)


def test_steps_that_a_hook_takes_in_the_middle_of_backward(seed):
    model, x, scaler = prepared(seed)
    wanted = plainly(seed, lambda: mean_square(model(x)), model)
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.0) for parameter in model.parameters()}
    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(lambda parameter: scaler.step(optimizers[parameter]))
    unmeasured(scaler, lambda: mean_square(model(x)), model)
    assert_same(gradients(model), wanted)


def scaler_forwards(model):
    return [module.forward for module in model.modules() if isinstance(module.__dict__.get("forward"), WatchedForward)]


def test_a_walk_tells_nodes_of_before_from_those_of_now():
    w = torch.nn.Parameter(torch.ones(2, 2))
    inner = w.tanh()
    begun = torch._C._autograd._get_sequence_nr()
    old, new = inner.exp(), w.tanh().exp()
    shapes = [compute_graph_shape_and_nodes([(x.grad_fn, 0)], begun, frozenset())[0] for x in (old, new)]
    assert shapes[0] != shapes[1]
    assert compute_graph_shape_and_nodes([(old.grad_fn, 0)], 0, frozenset([inner.grad_fn]))[0] == shapes[0]


class Remembers(torch.nn.Module):
    """A model that hands on what it was given, too."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x, memory):
        return self.layer(x), memory


def test_a_tensor_that_outlives_forward_passes_gets_no_hooks_of_theirs(seed, monkeypatch):
    torch.manual_seed(seed)
    model, x, memory = Remembers(), batch(), batch().requires_grad_() * 2
    scaler, made = hu.AdaptiveGradScaler(model), []
    entering = _replay._move_output_gradient
    monkeypatch.setattr(_replay, "_move_output_gradient", lambda *given: (made.append(1), entering(*given))[1])
    for _ in range(6):
        clear(model)
        scaler._controller.backward.end_iteration()
        scaler._controller.backward.is_measuring = False
        y, same = model(x, memory)
        assert same is memory
        scaler.scale(mean_square(y) + same.sum()).backward(retain_graph=True)
    assert replayed(scaler)
    assert len(made) == _replay.count_replays(scaler)
