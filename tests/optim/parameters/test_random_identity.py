"""What keys a parameter's random bits: its name where it has one, else its position."""

import copy
import threading
import weakref

import pytest
import torch

import halfulp as hu
from halfulp.optim.parameters import _first_steps
from halfulp.optim.parameters._random_identity import identities_of, name_identity


def _step(groups, **options):
    optimizer = hu.optim.SGD(groups, lr=1.0, weight_update="stochastic", **options)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 2.0**-9)
    optimizer.step()
    return [parameter.detach() for parameter in parameters]


def _ones(count):
    return [torch.nn.Parameter(torch.ones(512).bfloat16()) for _ in range(count)]


def test_named_parameters_draw_the_same_in_any_order_and_company():
    a, b = _step(list(zip("ab", _ones(2))))
    other_b, c, other_a = _step(list(zip("bca", _ones(3))))
    assert torch.equal(a, other_a)
    assert torch.equal(b, other_b)
    assert not torch.equal(a, b)
    assert not torch.equal(a, c)


def test_groups_of_named_parameters_draw_as_one_list():
    a, b = _step(list(zip("ab", _ones(2))))
    first, second = _ones(2)
    grouped = _step([{"params": [("b", first)]}, {"params": [("a", second)], "lr": 1.0}])
    assert torch.equal(grouped[0], b)
    assert torch.equal(grouped[1], a)


def test_unnamed_parameters_draw_by_position_over_all_groups():
    a, b = _step(_ones(2))
    first, second = _ones(2)
    grouped = _step([{"params": [first]}, {"params": [second]}])
    assert torch.equal(grouped[0], a)
    assert torch.equal(grouped[1], b)
    assert not torch.equal(a, b)


def test_a_group_added_later_goes_on_counting():
    first, second = _ones(2)
    optimizer = hu.optim.SGD([first], lr=1.0, weight_update="stochastic")
    optimizer.add_param_group({"params": [second]})
    first.grad = second.grad = torch.full_like(first, 2.0**-9)
    optimizer.step()
    assert [p.detach().tolist() for p in (first, second)] == [p.tolist() for p in _step(_ones(2))]


def _trained_in_backward(count, steps=2, named=False):
    """Layers of equal weights and gradients, an optimizer each, stepped in backward."""
    layers = [torch.nn.Parameter(torch.ones(256).bfloat16()) for _ in range(count)]
    optimizers = []
    for number, layer in enumerate(layers):
        given = [(f"layers.{number}", layer)] if named else [layer]
        optimizer = hu.optim.SGD(given, lr=2.0**-12, weight_update="stochastic")
        layer.register_post_accumulate_grad_hook(lambda parameter, optimizer=optimizer: optimizer.step())
        optimizers.append(optimizer)
    with hu.kernels.engine("reference"):
        for _ in range(steps):
            for layer in layers:
                layer.grad = None
            sum(layer.float().sum() for layer in layers).backward()
    return layers, optimizers


def test_optimizers_that_step_in_backward_share_no_bits_and_repeat():
    layers, optimizers = _trained_in_backward(15)
    assert len({tuple(layer.tolist()) for layer in layers}) == 15
    again, _ = _trained_in_backward(15)
    assert all(torch.equal(one, other) for one, other in zip(layers, again))
    file = optimizers[3].state_dict()
    resumed = hu.optim.SGD([torch.nn.Parameter(layers[3].detach().clone())], lr=2.0**-12, weight_update="stochastic")
    resumed.load_state_dict(file)
    assert resumed.param_groups[0]["identities"] == optimizers[3].param_groups[0]["identities"]


def test_names_stay_the_identities_in_backward():
    _, optimizers = _trained_in_backward(3, named=True)
    assert [identities_of(o.param_groups[0]) for o in optimizers] == [[name_identity(f"layers.{k}")] for k in range(3)]


def _layers(*seeds):
    return [torch.nn.Parameter(torch.randn(256, generator=torch.Generator().manual_seed(s)).bfloat16()) for s in seeds]


def _made(parameters, **options):
    return [hu.optim.SGD([one], lr=1.0, weight_update="stochastic", **options) for one in parameters]


def _begin(*optimizers):
    """Step each once, in turn; return the identities of all."""
    for optimizer in optimizers:
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = torch.full_like(parameter, 2.0**-9)
        optimizer.step()
    return [identities_of(optimizer.param_groups[0]) for optimizer in optimizers]


def test_optimizers_that_wait_for_each_other_share_no_bits_and_repeat():
    layers = _layers(*range(15))
    optimizers = _made(layers)
    assert _begin(*optimizers, *optimizers) == [[k] for k in range(15)] * 2
    # Again in the same process, beside the old ones, as in a notebook: the same bits.
    again = _layers(*range(15))
    assert _begin(*(others := _made(again)), *others) == [[k] for k in range(15)] * 2
    assert all(torch.equal(one, other) for one, other in zip(layers, again))


def test_the_bits_are_others():
    one, other, alone = (torch.nn.Parameter(torch.ones(512).bfloat16()) for _ in range(3))
    beside, far = _layers(1)[0], _layers(2)[0]
    pairs = [hu.optim.SGD([a, b], lr=1.0, weight_update="stochastic") for a, b in ((one, beside), (other, far))]
    _begin(*pairs)
    assert not torch.equal(one, other)
    _begin(*_made([alone]))
    assert torch.equal(alone, one)


def test_each_counts_all_parameters_of_those_before_it():
    a, b, c, d, e, f = _layers(*range(6))
    first = hu.optim.SGD([{"params": [a]}, {"params": [b, c]}], lr=1.0, weight_update="stochastic")
    second = hu.optim.SGD([{"params": [d, e]}, {"params": [f]}], lr=1.0, weight_update="stochastic")
    _begin(second, first)
    numbers = [[identities_of(group) for group in optimizer.param_groups] for optimizer in (first, second)]
    assert numbers == [[[3], [4, 5]], [[0, 1], [2]]]


def test_copies_draw_the_same_however_they_are_stepped():
    """Two runs side by side, of a generator and a discriminator each."""
    runs = [_made(_layers(1, 2)) for _ in range(2)]
    assert _begin(runs[0][0], runs[0][1], runs[1][0], runs[1][1]) == [[0], [1]] * 2
    one, other = _made(_layers(3)), _made(_layers(3))
    assert _begin(*one, *other, *one, *other) == [[0]] * 4
    deep = _made(_layers(3, 4))
    copies = copy.deepcopy(deep)
    assert _begin(*copies, *deep) == [[0], [1]] * 2


def test_a_part_of_another_draws_as_in_the_whole():
    whole, part = _layers(1, 2), _layers(1)
    both = hu.optim.SGD(whole, lr=1.0, weight_update="stochastic"), *_made(part)
    assert _begin(*both) == [[0, 1], [0]]
    assert torch.equal(whole[0], part[0])


def test_who_is_made_later_counts_from_the_start():
    """As the second run of a cell: what stepped before it was made may belong to another program."""
    old = _made(_layers(1))
    _begin(*old)
    new = _made(_layers(2))
    assert _begin(*old, *new) == [[0], [0]]


def test_who_never_steps_and_who_is_gone_count_for_nothing():
    idle, deleted = _made(_layers(1)), _made(_layers(2))
    del deleted
    used = _made(_layers(3))
    assert _begin(*used) == [[0]]
    again = _made(_layers(3))
    del idle
    assert _begin(*again) == [[0]]


def test_another_seed_and_names_are_left_alone():
    a, b, c = _layers(1, 2, 3)
    plain, seeded = _made([a]), _made([b], seed=1)
    named = [hu.optim.SGD([("c", c)], lr=1.0, weight_update="stochastic")]
    assert _begin(*plain, *seeded, *named) == [[0], [0], [name_identity("c")]]


def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one():
    def run(optimizers, files=None, steps=2):
        for optimizer, file in zip(optimizers, files or ()):
            optimizer.load_state_dict(file)
        return [_begin(*optimizers) for _ in range(steps)][-1]

    whole, half = _layers(1, 2), _layers(1, 2)
    run(_made(whole), steps=4)
    stopped = _made(half)
    run(stopped)
    files = [optimizer.state_dict() for optimizer in stopped]
    resumed = [torch.nn.Parameter(one.detach().clone()) for one in half]
    assert run(_made(resumed), files) == [[0], [1]]
    assert all(torch.equal(one, other) for one, other in zip(whole, resumed))
    # Loaded before the first step: the file says which numbers, the order adds what it did.
    fresh = _made(_layers(1, 2))
    assert run(_made(_layers(1, 2)), [optimizer.state_dict() for optimizer in fresh]) == [[0], [1]]


def test_threads_do_not_count_for_each_other():
    optimizers = _made(_layers(1, 2, 3))
    found = []
    thread = threading.Thread(target=lambda: found.extend(_begin(optimizers[0])))
    thread.start()
    thread.join()
    assert found + _begin(optimizers[1], optimizers[2]) == [[0], [0], [1]]


def test_hooks_of_several_passes_and_of_runs_side_by_side():
    runs = [_hooked(_layers(*range(5))) for _ in range(2)]
    for layers, _ in runs:
        sum(layer.float().sum() for layer in layers[:2]).backward()
        sum(layer.float().sum() for layer in layers).backward()
    for _, optimizers in runs:
        numbers = [optimizer.param_groups[0]["identities"][0] for optimizer in optimizers]
        assert sorted(numbers) == list(range(5))
    assert all(torch.equal(a, b) for a, b in zip(runs[0][0], runs[1][0]))


def _hooked(layers):
    """Layers with an optimizer each, stepped in backward."""
    optimizers = _made(layers)
    for layer, optimizer in zip(layers, optimizers):
        layer.register_post_accumulate_grad_hook(lambda parameter, optimizer=optimizer: optimizer.step())
    return layers, optimizers


def test_replicas_draw_by_position_whatever_steps_beside_them(tmp_path):
    models = [torch.nn.Linear(8, 8, bias=False).bfloat16() for _ in range(2)]
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        replica = torch.nn.parallel.DistributedDataParallel(models[0])
        held, beside = _made([models[0].weight]), _made([models[1].weight])
        assert _begin(*beside, *held) == [[0], [0]]
        del replica
    finally:
        torch.distributed.destroy_process_group()


def test_a_first_step_that_raises_is_made_again_under_the_same_numbers():
    first, second = _made(_layers(1)) + _made(_layers(2))
    _begin(first)
    parameter = second.param_groups[0]["params"][0]
    second.param_groups[0]["lr"] = float("nan")
    parameter.grad = torch.ones_like(parameter)
    with pytest.raises(ValueError, match="lr=nan"):
        second.step()
    second.param_groups[0]["lr"] = 1.0
    assert _begin(second) == [[1]]


def test_parameters_put_into_a_group_before_the_first_step_count():
    a, b, c = _layers(1, 2, 3)
    first, second = _made([a]) + _made([b])
    second.param_groups[0]["params"].append(c)
    assert _begin(second, first) == [[0, 1], [2]]


def test_an_optimizer_that_is_never_stepped_keeps_few_first_steps(monkeypatch):
    monkeypatch.setattr(_first_steps, "_waiting", weakref.WeakSet())
    monkeypatch.setattr(_first_steps, "_REMEMBERED", 4)
    idle = _made(_layers(0))
    for _ in range(5):
        assert _begin(*_made(_layers(1, 2))) == [[0], [1]]
    assert len(_first_steps._history.steps) == 5
    del idle
    _begin(*_made(_layers(1)))
    assert len(_first_steps._history.steps) == 1
