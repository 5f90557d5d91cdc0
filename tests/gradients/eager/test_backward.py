"""Tensors that leave a model by other ways than its output, and those that come in."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import halfulp as hu

from ..exponents import WIDTH, assert_same, batch, mean_square, mlp, plainly, scrambled


class Keeping(nn.Module):
    """Keeps what is between its layers, and takes something to add there."""

    def __init__(self):
        super().__init__()
        self.first, self.last, self.kept = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), None

    def forward(self, x, more=0.0):
        self.kept = self.first(x).tanh() + more
        return self.last(self.kept)


def exact(model, run, seed, **options):
    wanted = plainly(seed, run, model)
    scaler = hu.AdaptiveGradScaler(model, **options)
    assert_same(scrambled(seed, scaler, lambda: scaler.scale(run()).backward(), model), wanted)


@pytest.mark.parametrize("change", [lambda h: h * 0.5, torch.clone, lambda h: torch.cat([h[:2], h[2:]])])
def test_what_was_made_of_a_kept_tensor_is_refused_by_the_next_forward_pass(change, seed):
    model, x = Keeping(), batch()
    hu.AdaptiveGradScaler(model)
    model(x)
    with pytest.raises(ValueError, match=r"from inside the model, at 'first', is read outside"):
        model(x, change(model.kept))


def test_a_kept_tensor_itself_may_come_back(seed):
    model, x = Keeping(), batch()

    def run():
        model(x)
        return mean_square(model(x, model.kept))

    exact(model, run, seed)


def test_outputs_come_back_changed(seed):
    model, x = Keeping(), batch()
    exact(model, lambda: mean_square(model(x, model(x).tanh() * 0.5)), seed)


def test_a_kept_tensor_that_changed_outside_is_refused_inside(seed):
    class Recurrent(Keeping):
        def forward(self, x):
            return super().forward(x, 0.0 if self.kept is None else self.kept)

    model, x = Recurrent(), batch()
    hu.AdaptiveGradScaler(model)
    model(x)
    model.kept = model.kept * 0.5
    with pytest.raises(ValueError, match="from inside the model, at 'first'"):
        model(x)


def test_a_branch_in_another_thread_is_refused(seed):
    class Branching(Keeping):
        def forward(self, x):
            h = self.first(x).tanh()
            with ThreadPoolExecutor(1) as pool:
                return self.last(h + pool.submit(lambda: h.exp()).result())

    model, x = Branching(), batch()
    hu.AdaptiveGradScaler(model)
    with pytest.raises((ValueError, NotImplementedError), match="inside"):
        model(x)


def test_an_inner_tensor_of_one_scalers_model_in_another_ones(seed):
    one, other, x = Keeping(), mlp(), batch()

    def run():
        one(x)
        return mean_square(other(one.kept))

    wanted = plainly(seed, run, one, other)
    hu.AdaptiveGradScaler(one)
    scaler = hu.AdaptiveGradScaler(other)
    assert_same(scrambled(seed, scaler, lambda: scaler.scale(run()).backward(), one, other), wanted)


def test_one_output_twice_stays_one(seed):
    class Twice(nn.Linear):
        def forward(self, x):
            out = super().forward(x)
            return {"last": out, "all": [x, out]}

    model, x = Twice(WIDTH, WIDTH), batch()

    def run():
        out = model(x)
        assert out["last"] is out["all"][1]
        return mean_square(out["last"]) + (out["all"][1] * 3).tanh().sum()

    exact(model, run, seed)


@pytest.mark.parametrize("options", [{}, {"format": "e5m2"}], ids=str)
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_hook_that_differentiates_another_graph_sees_true_gradients(reentrant, options, seed):
    """As of a deep equilibrium model, whose hook solves for its gradient by the graph of one more step."""
    seen = []

    class Equilibrium(nn.Module):
        def __init__(self):
            super().__init__()
            self.step, self.last, self.block = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), mlp(2)

        def forward(self, x):
            inner = x.clone().requires_grad_()
            again = self.step(inner).tanh()

            def differentiate(gradient):
                seen.append(torch.autograd.grad(again, inner, torch.ones_like(again), retain_graph=True)[0])

            h = self.step(x).tanh()
            h.register_hook(differentiate)
            return checkpoint(self.block, self.last(h), use_reentrant=reentrant)

    model, x = Equilibrium(), batch()
    plainly(seed, lambda: mean_square(model(x)), model)
    scaler = hu.AdaptiveGradScaler(model, **options)
    scrambled(seed, scaler, lambda: scaler.scale(mean_square(model(x))).backward(), model)
    assert len(seen) == 3
    assert all(torch.equal(one, seen[0]) for one in seen)
