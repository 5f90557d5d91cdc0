"""Powers of two change no bit and no stride; exponents follow what losses send into the model, pass by pass."""

import itertools
import math
import random

import pytest
import torch
from torch import nn

import halfulp as hu
from halfulp.gradients import _site as _powers
from halfulp.gradients._site import copy_keeping_strides, multiply_by_power_of_two
from halfulp.gradients.eager._backward import BackwardHooks
from halfulp.kernels import same_bits

from .exponents import WIDTH, assert_same, batch, case_of, clear, gradients, mean_square, mlp, plainly, scrambled, sites

PLACES = ["host", "device"]
ROW = 32


@pytest.fixture(params=PLACES)
def place(request, monkeypatch):
    """Where the lift is: numbers of an accelerator stay tensors."""
    if request.param == "device":
        monkeypatch.setattr(_powers, "is_on_host", lambda tensor: False)
    return request.param


class Loop:
    """A training whose weights stand still; ``step`` takes the losses of an iteration."""

    def __init__(self, model, **options):
        self.model = model
        self.scaler = hu.AdaptiveGradScaler(model, **{"format": "fp16", **options})
        self.opt = torch.optim.SGD(model.parameters(), lr=0.0)

    def step(self, *losses):
        clear(self.model)
        for loss in losses:
            self.scaler.scale(loss()).backward()
        found = gradients(self.model)
        scale = self.scaler.get_scale()
        self.scaler.step(self.opt)
        self.scaler.update()
        return {key: value / scale for key, value in found.items()} if self.scaler.last_step.applied else None


@pytest.mark.parametrize("name", ["multilayer-perceptron", "tied-autoencoder", "lstm", "hf-gpt2", "hf-t5"])
def test_a_lift_changes_no_bit(name, place, seed):
    case = case_of(name, seed)
    wanted = plainly(seed, case.run, case.model)
    scaler = hu.AdaptiveGradScaler(case.model)
    found = scrambled(seed, scaler, lambda: scaler.scale(case.run()).backward(), case.model)
    assert scaler._controller.backward.loss_follower._is_lift_found
    assert_same(found, wanted)


def test_a_loss_times_a_power_of_two_has_the_same_digits(place, seed):
    """Measured or not: every rounding is the one of the loss as it was."""
    x = batch()
    loop = Loop(mlp())
    for _ in range(6):
        base = loop.step(lambda: mean_square(loop.model(x)))
    for k in range(40):
        power = random.randint(-40, 40)
        found = loop.step(lambda power=power: mean_square(loop.model(x)) * 2.0**power)
        assert found is not None, k
        for key, gradient in found.items():
            assert same_bits(gradient, base[key] * 2.0**power), (k, power, key)


def test_losses_of_one_iteration_have_lifts_of_their_own(place, seed):
    x = batch()
    loop = Loop(mlp())
    alone = loop.step(lambda: mean_square(loop.model(x)))
    alone = [loop.step(lambda: mean_square(loop.model(x))) for _ in range(6)][-1]
    for _ in range(20):
        powers = [random.randint(-20, 20) for _ in range(3)]
        found = loop.step(*(lambda power=power: mean_square(loop.model(x)) * 2.0**power for power in powers))
        for key, gradient in found.items():
            total = sum(2.0**power for power in powers)
            assert torch.allclose(gradient, alone[key] * total, rtol=1e-6, atol=0)


@pytest.mark.parametrize("value", [0.0, math.inf, math.nan])
def test_what_has_no_size_is_not_followed(value, place, seed):
    x = batch()
    loop = Loop(mlp())
    for _ in range(6):
        loop.step(lambda: mean_square(loop.model(x)))
    before = sites(loop.scaler)
    for k in range(20):
        factor = value if k % 2 else 1.0
        found = loop.step(lambda factor=factor: mean_square(loop.model(x)) * factor)
        assert (found is not None) == (k % 2 == 0 or value == 0)
    assert sites(loop.scaler) == before


def test_a_lift_stays_within_float32(place, seed):
    x = batch()
    loop = Loop(mlp(), init_scale=1.0)
    for power in (0, 0, 0, 0, -60, 0, 60, 0, -60, 60):
        found = loop.step(lambda power=power: mean_square(loop.model(x)) * 2.0**power)
        assert found is not None
        assert all(bool(gradient.any()) for gradient in found.values())


def test_a_resumed_scaler_follows_the_same_losses(place, seed):
    x = batch()
    loop = Loop(mlp())

    def steps(loop, powers):
        return [loop.step(lambda power=power: mean_square(loop.model(x)) * 2.0**power) for power in powers]

    steps(loop, (0, 3, -5, 8, 0, -11, 4))
    copy = mlp()
    copy.load_state_dict(loop.model.state_dict())
    resumed = Loop(copy)
    resumed.scaler.load_state_dict(loop.scaler.state_dict())
    for one, other in zip(steps(loop, range(-20, 20)), steps(resumed, range(-20, 20)), strict=True):
        assert_same(other, one)
    assert sites(resumed.scaler) == sites(loop.scaler)


class TwoOutputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk, self.left, self.right = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        h = self.trunk(x).tanh()
        return self.left(h), self.right(h)


@pytest.mark.parametrize("format", ["fp16", "e5m2"])
def test_where_the_first_output_misleads_it_comes_back(format, seed):
    """Both outputs' losses vary by themselves, and the size of one says nothing of the other's."""
    x = batch()
    loop = Loop(TwoOutputs(), format=format)

    def loss(powers):
        return sum(mean_square(y) * 2.0**power for y, power in zip(loop.model(x), powers))

    row = longest = skipped = 0
    for _ in range(200):
        powers = [random.choice((-12, -6, 0)) for _ in range(2)]
        row = 0 if loop.step(lambda powers=powers: loss(powers)) is not None else row + 1
        longest, skipped = max(longest, row), skipped + (row > 0)
    assert longest <= ROW
    assert skipped <= 40, skipped


class Boosted(nn.Module):
    """Two layers; between them gradients grow, of which no loss tells."""

    def __init__(self):
        super().__init__()
        self.first, self.last, self.boost = nn.Linear(8, 8), nn.Linear(8, 8), 1.0

    def forward(self, x):
        h = self.first(x).tanh()
        h.register_hook(lambda gradient: gradient * self.boost)
        return self.last(h)


def test_after_skips_in_a_row_a_small_loss_is_still_followed(seed):
    """Without it the smaller of two losses was all zeros for as long as an overflow is remembered."""
    x, model = batch(), Boosted()
    loop = Loop(model)
    for k in range(8):
        model.boost = 2.0 ** (12 * k)
        loop.step(lambda: mean_square(model(x)))
    model.boost = 1.0
    for k in range(ROW):
        found = loop.step(lambda k=k: mean_square(model(x)) * 2.0 ** (-30 * (k % 2)))
        above = [gradient for (_, key), gradient in (found or {}).items() if key.startswith("last")]
        assert all(bool(gradient.count_nonzero()) for gradient in above), k


def test_what_was_learned_while_losses_were_not_followed_holds_afterwards(seed):
    """Exponents of a small loss were taken for those of the larger one before it, and lifted once more."""
    x, model = batch(), mlp()
    loop = Loop(model, interval=4)
    following = loop.scaler._controller.loss_follower
    for _ in range(8):
        loop.step(lambda: mean_square(model(x)) * 2.0**20)
    following.resume_iteration = loop.scaler._controller.iteration + 40
    for _ in range(60):
        assert loop.step(lambda: mean_square(model(x))) is not None
    assert following.is_active


VIEWS = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.transpose(0, 2),
    "columns": lambda x: x[..., 3:7],
    "rows": lambda x: x[1:],
    "every second": lambda x: x[:, ::2, ::3],
    "one of many": lambda x: x[:, :, 5],
    "expanded": lambda x: x[:, :1].expand(-1, 9, -1),
    "a number expanded": lambda x: x[2, 2, 2].expand(4, 5),
    "expanded columns": lambda x: x[..., 2:5].unsqueeze(1).expand(-1, 3, -1, -1),
    "overlapping": lambda x: x.flatten()[:20].unfold(0, 5, 1),
    "empty": lambda x: x[:0],
    "a number": lambda x: x[1, 2, 3],
    "ones among the sizes": lambda x: x[:1, 2:3],
}


def pattern(x):
    """What a kernel sees of strides: which are 0 or 1, their order, which dimensions are one, and the alignment."""
    sized = [i for i, n in enumerate(x.shape) if n > 1]
    order = sorted(sized, key=lambda i: (x.stride(i), i))
    one = [x.stride(b) == x.stride(a) * x.shape[a] for a, b in itertools.pairwise(order)]
    unit = 64 // x.element_size()
    kinds = [min(x.stride(i), 2) for i in sized], [x.stride(i) % unit for i in sized]
    return order, one, kinds, x.storage_offset() % unit


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.complex64])
def test_a_shifted_gradient_lies_as_it_did(view, dtype, seed):
    x = VIEWS[view](torch.randn(4, 6, 12).to(dtype))
    for exponent in (-3, 5):
        out = multiply_by_power_of_two(x, exponent)
        assert same_bits(out.contiguous(), x.contiguous() * 2.0**exponent)
        assert out.data_ptr() != x.data_ptr() or not x.numel()
        if x.numel() and view != "overlapping":
            assert pattern(out) == pattern(x)
            assert out.data_ptr() % 64 == x.data_ptr() % 64
    assert multiply_by_power_of_two(x, 0) is x


@pytest.mark.parametrize("view", VIEWS)
def test_an_output_is_a_copy_that_lies_as_it_did(view, seed):
    leaf = torch.randn(4, 6, 12, requires_grad=True)
    x = VIEWS[view](leaf * 1)
    out, g = copy_keeping_strides(x), torch.randn(x.shape)
    assert same_bits(out.detach().contiguous(), x.detach().contiguous())
    if x.numel() and view != "overlapping":
        assert out.stride() == x.stride() or pattern(out)[:3] == pattern(x)[:3]
    wanted, found = (torch.autograd.grad(y, leaf, g, retain_graph=True)[0] for y in (x, out))
    assert same_bits(found, wanted)


class Joined(nn.Module):
    """Gradients that are parts of others, or expanded, on their way into sums."""

    def __init__(self, kind):
        super().__init__()
        self.a, self.b, self.w = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Parameter(torch.randn(1))
        self.out, self.kind = nn.Linear(4 * WIDTH, 3), kind

    def forward(self, x):
        h, other = self.a(x) + self.w, self.b(x)
        match self.kind:
            case "joined":
                return self.out(torch.cat([h, other], 1))
            case "stacked":
                return self.out(torch.cat([torch.stack([other, h], 2).flatten(1)], 0))
            case "averaged":
                return h.mean(0) + other.sum(0)
            case "columns":
                return (h * other)[:, ::2]
            case "expanded":
                return (self.w * h[:1]).expand(len(x), -1)


@pytest.mark.parametrize("kind", ["joined", "stacked", "averaged", "columns", "expanded"])
def test_edges_keep_the_strides_of_every_gradient_and_output(kind, seed, monkeypatch):
    rows = random.choice([1, 3, 17, 64])
    model, x = Joined(kind), batch(rows)
    seen = []

    def run():
        out = model(x)
        seen.append(pattern(out.detach())[:3])
        return out.square().sum() / out.numel() + out.sum()

    wanted, loss = plainly(seed, run, model), run().detach()
    scaler = hu.AdaptiveGradScaler(model)
    make, checked = BackwardHooks.get_edge_hook, []

    def watching(self, source, target, *made_in):
        hook = make(self, source, target, *made_in)

        def look(gradients):
            out = hook(gradients)
            if out is not None:
                checked.append(pattern(out[0]) == pattern(gradients[0]))
            return out

        return look

    monkeypatch.setattr(BackwardHooks, "get_edge_hook", watching)
    # Random exponents of two sites may be equal, and an edge between them then gives its gradient on as it is.
    for more in range(4):
        if not checked:
            assert_same(scrambled(seed + more, scaler, lambda: scaler.scale(run()).backward(), model), wanted)
    assert same_bits(run().detach(), loss)
    assert all(one == seen[0] for one in seen)
    assert checked
    assert all(checked)


def test_the_law_sees_a_gradient_made_contiguous(seed):
    x = torch.randn(4, 6, 12)
    for view in ("columns", "rows", "every second", "one of many", "expanded"):
        assert pattern(VIEWS[view](x) * 2.0) != pattern(VIEWS[view](x)), view
