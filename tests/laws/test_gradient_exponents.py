"""Law: in every architecture, random gradient exponents change no bit of float32 gradients."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import halfulp as hu

from ..gradients.exponents import (
    ALL,
    WIDTH,
    assert_same,
    batch,
    case_of,
    clear,
    equalise,
    gradients,
    mean_square,
    mlp,
    plainly,
    scramble,
    scrambled,
)

# Torch has no such kernel in 16 bits, or its loss overflows at 2^10.
NO_HALF = {"lstm", "bilinear", "two-heads"}
# Without autocast's cache each use of a weight has a cast of its own; with it, shared ones are summed in 16 bits.
HALF = ["multilayer-perceptron", "tied-autoencoder", "hf-gpt2", "hf-bert", "hf-mixtral", "hf-mamba"]


def trial(case, seed, **options):
    wanted = plainly(seed, case.run, case.model)
    scaler = hu.AdaptiveGradScaler(case.model, **options)
    return scrambled(seed, scaler, lambda: scaler.scale(case.run()).backward(), case.model), wanted, scaler


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ALL)
def test_random_exponents_change_no_bit(name, seed):
    found, wanted, scaler = trial(case_of(name, seed), seed)
    assert len({site.exponent for site in scaler._controller.sites.values()}) > 1
    assert_same(found, wanted)


def test_the_comparison_sees_an_edge_that_is_missing(seed, monkeypatch):
    case = case_of("multilayer-perceptron", seed)
    wanted = plainly(seed, case.run, case.model)
    scaler = hu.AdaptiveGradScaler(case.model)
    backward = scaler._controller.backward
    opened = scaler._controller.sites.get_or_create_site
    lost = []

    def get_edge_hook(source, target, *made_in):
        if opened("2") in (source, target) and not (lost or made_in):
            lost.append(source)
            return lambda gradient: None
        return type(backward).get_edge_hook(backward, source, target, *made_in)

    monkeypatch.setattr(backward, "get_edge_hook", get_edge_hook)

    def run():
        lost.clear()
        scaler.scale(case.run()).backward()

    torch.manual_seed(seed)
    run()
    for number, site in enumerate(scaler._controller.sites.values()):
        site.exponent = number
    clear(case.model)
    run()
    found = {key: gradient / scaler.get_scale() for key, gradient in gradients(case.model).items()}
    with pytest.raises(AssertionError):
        assert_same(found, wanted)


def against_grad_scaler(case, seed, dtype, cache):
    def run(scaler):
        clear(case.model)
        torch.manual_seed(seed)
        with torch.autocast("cpu", dtype, cache_enabled=cache):
            loss = case.run()
        scaler.scale(loss).backward()
        return gradients(case.model)

    wanted = run(torch.amp.GradScaler("cpu", init_scale=2.0**10))
    scaler = hu.AdaptiveGradScaler(case.model, float32_outputs=False)
    run(scaler)
    equalise(scaler, 10)
    scaler._controller.backward.end_iteration()
    assert_same(run(scaler), wanted)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", HALF)
def test_equal_exponents_are_grad_scaler_under_autocast(name, dtype, seed):
    against_grad_scaler(case_of(name, seed), seed, dtype, cache=True)


@pytest.mark.parametrize("name", ["siamese", "albert", "neural-ode", "retinanet", "discriminator", "perceiver"])
def test_equal_exponents_are_grad_scaler_for_shared_weights(name, seed):
    against_grad_scaler(case_of(name, seed), seed, torch.float16, cache=False)


def test_float16_parameters_with_float32_gradients(seed):
    model = mlp().half()
    x = batch().half()
    hu.float32_gradients(model)
    reference = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    reference.scale(mean_square(model(x).float())).backward()
    wanted = gradients(model)
    scaler = hu.AdaptiveGradScaler(model)
    scaler.scale(mean_square(model(x).float())).backward()
    equalise(scaler, 10)
    scaler._controller.backward.end_iteration()
    clear(model)
    scaler.scale(mean_square(model(x).float())).backward()
    assert_same(gradients(model), wanted)
    opt = hu.optim.SGD(model.parameters(), lr=0.1)
    before = model[0].weight.clone()
    scaler.step(opt)
    scaler.update()
    assert scaler.last_step.applied
    assert not torch.equal(model[0].weight, before)


def test_float16_gradients_that_need_the_exponents_survive(seed):
    """A loss of 2^-20: plain float16 gradients are zero, those with exponents are float32's to float16's precision."""
    model = mlp().half()
    with torch.no_grad():
        model[4].weight *= 4
    x = batch().half()
    wide = mlp()
    wide.load_state_dict({key: value.float() for key, value in model.state_dict().items()})
    (wide(x.float()).sum() * 2.0**-26).backward()
    wanted = gradients(wide)
    hu.float32_gradients(model)
    (model(x).sum() * 2.0**-26).backward()
    assert not model[0].weight.grad.any()
    clear(model)
    scaler = hu.AdaptiveGradScaler(model)
    scaler.scale(model(x).float().sum() * 2.0**-26).backward()
    equalise(scaler, 26)
    scaler._controller.backward.end_iteration()
    clear(model)
    scaler.scale(model(x).float().sum() * 2.0**-26).backward()
    for key, gradient in gradients(model).items():
        found = gradient / scaler.get_scale()
        assert (found - wanted[key]).norm() < 0.02 * wanted[key].norm(), key


class Everywhere(nn.Module):
    """A parameter that modules, matrix products and element-wise functions read."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.embed.weight
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, ids):
        h = self.mix(self.embed(ids)) * self.embed.weight[1]
        h = F.linear(h @ self.embed.weight, self.mix.weight.t(), self.mix.bias)
        return self.head(h) + self.embed.weight.sum(0)


def test_a_parameter_that_is_read_everywhere(seed):
    model, ids = Everywhere(), torch.randint(WIDTH, (5,))

    def run():
        return mean_square(model(ids))

    wanted = plainly(seed, run, model)
    scaler = hu.AdaptiveGradScaler(model)
    assert_same(scrambled(seed, scaler, lambda: scaler.scale(run()).backward(), model), wanted)


class Transposed(nn.Module):
    def __init__(self, read):
        super().__init__()
        self.weight, self.read = nn.Parameter(torch.randn(WIDTH, WIDTH)), read

    def forward(self, x):
        return F.linear(F.linear(x, self.weight).tanh(), self.read(self.weight, x))


@pytest.mark.parametrize(
    "read",
    [
        pytest.param(lambda w, x: w.t(), id="t()"),
        pytest.param(lambda w, x: w.T, id="T"),
        pytest.param(lambda w, x: w.mT, id="mT"),
        pytest.param(lambda w, x: w[0].expand_as(w), id="slice"),
        pytest.param(lambda w, x: w.expand_as(w), id="expand_as"),
    ],
)
def test_a_parameter_that_is_read_again_in_another_shape(read, seed):
    model, x = Transposed(read), batch()
    wanted = plainly(seed, lambda: mean_square(model(x)), model)
    scaler = hu.AdaptiveGradScaler(model)
    found = scrambled(seed, scaler, lambda: scaler.scale(mean_square(model(x))).backward(), model)
    assert_same(found, wanted)


def test_gradients_of_inputs(seed):
    model, x = mlp(), batch().requires_grad_()
    wanted = torch.autograd.grad(mean_square(model(x)), x)[0]
    scaler = hu.AdaptiveGradScaler(model)
    for _ in range(2):
        found = torch.autograd.grad(scaler.scale(mean_square(model(x))), x)[0] / scaler.get_scale()
        assert torch.equal(found, wanted)
        scramble(scaler)
    weights = list(model.parameters())
    wanted = torch.autograd.grad(mean_square(model(x)), weights)
    for a, b in zip(torch.autograd.grad(scaler.scale(mean_square(model(x))), weights), wanted):
        assert torch.equal(a / scaler.get_scale(), b)
