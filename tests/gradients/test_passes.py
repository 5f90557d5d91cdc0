"""Several passes, losses, models, scalers and optimizers: every combination leaves gradients exact."""

import pytest
import torch
from torch import nn

import halfulp as hu

from .exponents import WIDTH, assert_same, batch, clear, gradients, mean_square, mlp, plainly, scramble, scrambled


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
    assert {site.key for site in scaler._controller.sites} == {"global", "0.0", "0.2", "1.0", "1.2"}
    assert_same(found, wanted)


@pytest.mark.parametrize("mode", ["function", "module"])
def test_a_gan_with_two_scalers(mode, seed):
    maker, critic, z, real = mlp(), mlp(2), batch(), batch()

    def made():
        return -critic(maker(z)).mean()

    def judged():
        return critic(maker(z).detach()).mean() - critic(real).mean()

    wanted_of_maker = plainly(seed, made, maker)
    wanted_of_critic = plainly(seed, judged, critic)
    ours, theirs = (hu.AdaptiveGradScaler(model, mode=mode) for model in (maker, critic))
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


@pytest.mark.parametrize("mode", ["function", "module"])
def test_a_penalty_on_the_weights_outside_the_model(mode, seed):
    model, x = mlp(), batch()

    def run():
        return mean_square(model(x)) + sum(p.square().sum() for p in model.parameters())

    exact_or_refused(model, run, seed, mode=mode)


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
