"""hu.optim on parameters that hold their own components: the bits of Components(n) beside plain parameters."""

import copy
import io

import pytest
import torch

import halfulp as hu
from halfulp.kernels import same_bits

CASES = [(torch.bfloat16, 2), (torch.bfloat16, 3), (torch.bfloat16, 4), (torch.float16, 2), (torch.float16, 3)]
OPTIMIZERS = {
    "AdamW": lambda p, **options: hu.optim.AdamW(p, lr=1e-3, weight_decay=0.1, **options),
    "SGD": lambda p, **options: hu.optim.SGD(p, lr=1e-2, momentum=0.9, **options),
    "Lion": lambda p, **options: hu.optim.Lion(p, lr=1e-3, **options),
    "8bit": lambda p, **options: hu.optim.AdamW(p, lr=1e-3, state_dtype="8bit", **options),
    "wrap": lambda p, **options: hu.optim.wrap(torch.optim.RMSprop, p, lr=1e-3, foreach=False, **options),
}


def pair(dtype, count, seed, scale="none"):
    """One weight as an MCTensor and as a plain narrow parameter, and their components."""
    torch.manual_seed(seed)
    value = torch.randn(4, 32)
    held = torch.nn.Parameter(hu.MCTensor.encode(value, count, dtype, scale=scale))
    return held, value


def beside(make, value, dtype, count):
    """The same weight as a plain parameter whose components are the optimizer's."""
    plain = torch.nn.Parameter(value.clone())
    return plain, make([plain], param_dtype=dtype, weight_update=hu.Components(count), report_interval=1)


def components_of(optimizer, plain, count):
    names = ["residual"] if count == 2 else [f"component_{k}" for k in range(1, count)]
    return [plain.detach(), *(optimizer.state[plain][name] for name in names)]


# All by the reference; compiled every kind of components under one optimizer, and every optimizer on one kind.
BESIDE = [(*kind, name, "reference") for kind in CASES for name in OPTIMIZERS]
BESIDE += [(*kind, "AdamW", "auto") for kind in CASES]
BESIDE += [(*CASES[k], name, "auto") for k, name in enumerate(OPTIMIZERS) if name != "AdamW"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("dtype", "count", "name", "engine"), BESIDE)
def test_the_bits_are_those_of_components_beside_plain_parameters(dtype, count, name, engine, seed):
    held, value = pair(dtype, count, seed)
    make = OPTIMIZERS[name]
    plain, other = beside(make, value, dtype, count)
    optimizer = make([held], report_interval=1)
    with hu.kernels.engine(engine):
        for _ in range(4):
            gradient = torch.randn(4, 32).to(dtype)
            held.grad, plain.grad = gradient, gradient.clone()
            optimizer.step()
            other.step()
            for own, theirs in zip(held.components, components_of(other, plain, count), strict=True):
                assert same_bits(own.detach(), theirs)
    assert str(optimizer.report()) == str(other.report())
    assert "residual" not in optimizer.state[held]
    assert "component_1" not in optimizer.state[held]


def test_a_multicomponent_model_trains_and_is_saved_whole(seed):
    torch.manual_seed(seed)
    model = hu.multicomponent(torch.nn.Linear(32, 8), components=2, dtype=torch.bfloat16)
    optimizer = hu.optim.AdamW(model.parameters(), lr=1e-2)
    x = torch.randn(16, 32, dtype=torch.bfloat16)

    def step(model, optimizer):
        optimizer.zero_grad()
        (model(x).float() - 1).square().mean().backward()
        optimizer.step()

    for _ in range(3):
        step(model, optimizer)
    twin = copy.deepcopy(model)
    again = hu.optim.AdamW(twin.parameters(), lr=1e-2)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    again.load_state_dict(torch.load(file, weights_only=True))
    for _ in range(2):
        step(model, optimizer)
        step(twin, again)
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert all(same_bits(p.detach(), q.detach()) for p, q in zip(a.components, b.components, strict=True))


def test_float32_weights_are_the_sums_and_come_back(seed):
    torch.manual_seed(seed)
    model = hu.multicomponent(torch.nn.Linear(32, 8), components=3, dtype=torch.bfloat16)
    optimizer = hu.optim.AdamW(model.parameters(), lr=1e-2)
    model(torch.ones(1, 32, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    weights = optimizer.float32_state_dict(model)
    assert same_bits(weights["weight"], model.weight.detach().decode(torch.float32))
    model.weight.data.zero_()
    optimizer.load_float32_state_dict(model, weights)
    assert same_bits(model.weight.detach().decode(torch.float32), weights["weight"])


def test_averages_of_components_follow_and_show(seed):
    torch.manual_seed(seed)
    model = hu.multicomponent(torch.nn.Linear(32, 8), components=2, dtype=torch.bfloat16)
    average = hu.optim.EMA(model, 0.9)
    start = model.weight.detach().decode(torch.float32)
    with torch.no_grad():
        model.weight.add_(0.5)
    moved = model.weight.detach().decode(torch.float32)
    average.update()
    expected = start + (1 - 0.9) * (moved - start)
    assert torch.allclose(average.float32_state_dict()["weight"], expected, atol=2**-16)
    with average.apply():
        assert torch.allclose(model.weight.detach().decode(torch.float32), expected, atol=2**-16)
    assert torch.equal(model.weight.detach().decode(torch.float32), moved)


def test_gradients_with_components_are_taken_in_float32(seed):
    held, value = pair(torch.bfloat16, 2, seed)
    plain, other = beside(OPTIMIZERS["AdamW"], value, torch.bfloat16, 2)
    optimizer = OPTIMIZERS["AdamW"]([held])
    gradient = hu.MCTensor.encode(torch.randn(4, 32), 2, torch.bfloat16, gradients="components")
    plain.grad_dtype = None
    held.grad, plain.grad = gradient, gradient.decode(torch.float32)
    optimizer.step()
    other.step()
    assert same_bits(held.components[0].detach(), plain.detach())


def test_components_with_gaps_are_written_through(seed):
    torch.manual_seed(seed)
    value = torch.randn(32, 4)
    held = torch.nn.Parameter(hu.MCTensor.encode(value, 2, torch.bfloat16).t())
    plain, other = beside(OPTIMIZERS["SGD"], value.t().contiguous(), torch.bfloat16, 2)
    optimizer = OPTIMIZERS["SGD"]([held])
    held.grad = plain.grad = torch.randn(4, 32).bfloat16()
    optimizer.step()
    other.step()
    for own, theirs in zip(held.components, components_of(other, plain, 2), strict=True):
        assert same_bits(own.detach().contiguous(), theirs)


def test_replaced_components_are_seen(seed):
    held, _ = pair(torch.bfloat16, 2, seed)
    optimizer = OPTIMIZERS["SGD"]([held])
    held.grad = torch.ones(4, 32).bfloat16()
    optimizer.step()
    fresh = hu.MCTensor.encode(torch.zeros(4, 32), 2, torch.bfloat16)
    held.data = fresh
    optimizer.step()
    assert bool((fresh.decode() < 0).all())


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (lambda: hu.MCTensor.encode(torch.ones(4), 2), {}, "computed in float32"),
        (lambda: hu.MCTensor.encode(torch.ones(4).double(), 2), {}, "computed in float32"),
        (lambda: hu.MCTensor.encode(torch.ones(4), 2, torch.float16), {}, "with a scale"),
        (
            lambda: hu.MCTensor.encode(torch.ones(4), 2, torch.bfloat16),
            {"weight_update": "split"},
            "holds 2 components",
        ),
        (lambda: hu.MCTensor.encode(torch.ones(4), 2, torch.bfloat16), {"param_dtype": torch.bfloat16}, "param_dtype="),
        (lambda: hu.MCTensor.encode(torch.ones(4), 2, torch.bfloat16), {"format": "e8m5"}, "format="),
    ],
)
def test_what_cannot_be_stepped_is_refused_by_name(make, options, message):
    with pytest.raises(ValueError, match=message):
        hu.optim.AdamW([("w", torch.nn.Parameter(make()))], **options)


def test_one_component_takes_the_group_s_own_update(seed):
    torch.manual_seed(seed)
    value = torch.randn(4, 32)
    held = torch.nn.Parameter(hu.MCTensor.encode(value, 1, torch.bfloat16))
    plain = torch.nn.Parameter(value.bfloat16())
    for p in (held, plain):
        optimizer = hu.optim.AdamW([p], lr=1e-2, weight_update="kahan")
        p.grad = torch.ones(4, 32).bfloat16()
        optimizer.step()
    assert same_bits(held.components[0].detach(), plain.detach())
