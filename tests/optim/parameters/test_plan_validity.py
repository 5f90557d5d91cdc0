"""What the optimizer knows of a parameter is looked at again when the parameter, its group or its state changes."""

import copy

import pytest
import torch

import halfulp as hu
from halfulp.kernels import same_bits


@pytest.mark.parametrize("every", [2, 4, 50])
def test_new_memory_in_every_step(every):
    weight = torch.nn.Parameter(torch.zeros(40))
    optimizer = hu.optim.SGD([weight], lr=1.0, report_interval=every)
    kept = []
    for step in range(1, 121):
        kept.append(weight.data)
        weight.data = weight.data.clone()
        weight.grad = -torch.ones(40)
        optimizer.step()
        assert weight.eq(step).all()


def test_another_shape_and_another_layout_in_the_same_memory():
    base = torch.zeros(6)
    weight = torch.nn.Parameter(base)
    optimizer = hu.optim.SGD([weight], lr=1.0)
    weight.grad = torch.ones(6)
    optimizer.step()
    weight.grad, weight.data = None, base[:3]
    weight.grad = torch.ones(3)
    optimizer.step()
    assert base.tolist() == [-2, -2, -2, -1, -1, -1]
    square = torch.nn.Parameter(torch.arange(9.0).reshape(3, 3))
    optimizer = hu.optim.SGD([square], lr=1.0)
    gradient = torch.arange(9.0).reshape(3, 3)
    square.grad = gradient.clone()
    optimizer.step()
    square.data = torch.arange(9.0).reshape(3, 3).t()
    square.grad = gradient.clone()
    expected = square.detach() - gradient
    optimizer.step()
    assert torch.equal(square, expected)


def test_a_gradient_of_another_shape_is_refused():
    weight = torch.nn.Parameter(torch.zeros(4))
    optimizer = hu.optim.SGD([weight], lr=1.0)
    weight.grad = torch.ones(4)
    weight.data = torch.ones(8)
    with pytest.raises(ValueError, match=r"has shape \(4,\), the parameter \(8,\)"):
        optimizer.step()
    assert weight.eq(1).all()


def test_float32_weights_of_replaced_memory():
    model = torch.nn.Linear(4, 4, bias=False).bfloat16()
    optimizer = hu.optim.AdamW(model.parameters(), weight_update="split")
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    model.weight.data = torch.full((4, 4), 3.0).bfloat16()
    assert (optimizer.float32_state_dict(model)["weight"] - 3).abs().max() < 2**-6
    optimizer.load_float32_state_dict(model, {"weight": torch.full((4, 4), 5.0)})
    assert model.weight.eq(5).all()


def test_options_changed_in_the_group_are_followed():
    weight = torch.nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
    optimizer = hu.optim.SGD([weight], lr=2.0**-12, weight_update="nearest")
    for name, moved in (("nearest", False), ("kahan", True)):
        optimizer.param_groups[0]["weight_update"] = name
        for _ in range(64):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        assert bool(weight.eq(1 - 2.0**-6).all()) is moved


def test_a_seed_changed_in_the_group_is_followed_by_every_engine():
    def run(engine, seeds):
        weight = torch.nn.Parameter(torch.ones(512, dtype=torch.bfloat16))
        optimizer = hu.optim.SGD([weight], lr=2.0**-10, weight_update="stochastic")
        for seed in seeds:
            optimizer.param_groups[0]["seed"] = seed
            weight.grad = torch.ones_like(weight)
            with hu.kernels.engine(engine):
                optimizer.step()
        return weight.detach().clone()

    assert same_bits(run("llvm", (0, 5, 5)), run("reference", (0, 5, 5)))
    assert not same_bits(run("llvm", (0, 5, 5)), run("llvm", (0, 0, 0)))


def _train(model, optimizer, steps, start):
    for step in range(start, start + steps):
        generator = torch.Generator().manual_seed(step)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator).bfloat16()
        optimizer.step()


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("stepped", [True, False])
def test_a_loaded_state_governs_random_bits_and_states(named, stepped):
    def made(model, named=True, **options):
        parameters = model.named_parameters() if named else model.parameters()
        return hu.optim.AdamW(parameters, lr=1e-3, weight_update="stochastic", **options)

    model = torch.nn.Linear(16, 16).bfloat16()
    optimizer = made(model, betas=(0.99, 0.999))
    _train(model, optimizer, 3, 0)
    other = copy.deepcopy(model)
    resumed = made(other, named=named, seed=0 if not stepped else 9)
    if stepped:
        _train(other, resumed, 2, 50)
        other.load_state_dict(model.state_dict())
    resumed.load_state_dict(optimizer.state_dict())
    _train(model, optimizer, 3, 3)
    _train(other, resumed, 3, 3)
    for one, two in zip(model.parameters(), other.parameters()):
        assert same_bits(one.detach(), two.detach())
    for one, two in zip(optimizer.state.values(), resumed.state.values()):
        assert same_bits(one["exp_avg"], two["exp_avg"])


@pytest.mark.parametrize("count", [64, 4096])
@pytest.mark.parametrize("update", ["split8", "kahan"])
def test_memory_of_states_and_companions_replaced_between_steps(update, count, seed):
    """An offloader swaps `.data` of what the state holds: a step goes on in the memory that is there."""
    start, gradients = torch.randn(count).bfloat16(), [torch.randn(count).bfloat16() for _ in range(4)]
    found = []
    for replaces in (False, True):
        weight = torch.nn.Parameter(start.clone())
        optimizer = hu.optim.AdamW([weight], lr=0.1, weight_update=update)
        kept = []
        for gradient in gradients:
            weight.grad = gradient
            optimizer.step()
            tensors = {name: x for name, x in optimizer.state[weight].items() if isinstance(x, torch.Tensor)}
            kept.append([x.data for x in tensors.values()])
            for x in tensors.values() if replaces else ():
                x.data = x.data.clone()
        found.append([weight.detach().clone(), *(x.detach().clone() for x in tensors.values())])
        if replaces:
            before = [x.clone() for x in kept[-1]]
            weight.grad = gradients[0]
            optimizer.step()
            assert all(map(same_bits, kept[-1], before)), "written where nobody reads"
    assert all(map(same_bits, *found))
