"""What keys a parameter's random bits: its name where it has one, else its position."""

import torch

import halfulp as hu
from halfulp.optim.parameters._random_identity import hash_parameter_name, list_stream_ids


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


def test_names_stay_the_identities_in_backward():
    _, optimizers = _trained_in_backward(3, named=True)
    assert [list_stream_ids(o.param_groups[0]) for o in optimizers] == [
        [hash_parameter_name(f"layers.{k}")] for k in range(3)
    ]
