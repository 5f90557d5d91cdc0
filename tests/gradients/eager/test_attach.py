"""``mode="module"``: modules as sites, for models whose functions cannot be watched."""

import copy
import dataclasses
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, jvp, stack_module_state, vmap

import halfulp as hu
from halfulp.kernels import same_bits

from ..exponents import WIDTH, assert_same, batch, case_of, clear, mean_square, mlp, plainly, scrambled, sites


def trial(model, run, seed):
    wanted = plainly(seed, run, model)
    scaler = hu.AdaptiveGradScaler(model, mode="module")
    return scrambled(seed, scaler, lambda: scaler.scale(run()).backward(), model), wanted


def test_every_module_with_parameters_and_no_parts_is_a_site(seed):
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.ReLU(), mlp(2), nn.GRU(WIDTH, WIDTH))
    scaler = hu.AdaptiveGradScaler(model, mode="module")
    assert list(sites(scaler)) == ["global", "0", "1", "3.0", "3.2", "4"]


@pytest.mark.parametrize("name", ["truncated", "hf-llama", "hf-t5", "hf-mamba"])
def test_a_module_that_reads_its_input_twice_is_exact_but_for_the_order_of_sums(name, seed):
    case = case_of(name, seed)
    found, wanted = trial(case.model, case.run, seed)
    for key, gradient in wanted.items():
        assert (found[key] - gradient).norm() <= 1e-5 * gradient.norm(), key


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_scripted_function_between_modules(seed):
    @torch.jit.script
    def bend(h: torch.Tensor) -> torch.Tensor:
        return h.tanh() * h

    class Bent(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return self.last(bend(self.first(x)))

    model, x = Bent(), batch()
    found, wanted = trial(model, lambda: mean_square(model(x)), seed)
    for key, gradient in wanted.items():  # torch.jit may compile it anew from call to call
        assert (found[key] - gradient).norm() <= 1e-5 * gradient.norm(), key


def exact_or_refused(model, run, seed):
    try:
        found, wanted = trial(model, run, seed)
    except (ValueError, NotImplementedError):
        return
    assert_same(found, wanted)


def test_a_parameter_that_is_read_past_its_module(seed):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.last = nn.Embedding(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, ids):
            return F.linear(self.last(self.embed(ids)), self.embed.weight)

    model, ids = Tied(), torch.arange(WIDTH)
    exact_or_refused(model, lambda: mean_square(model(ids)), seed)


def test_an_output_that_an_earlier_hook_kept(seed):
    model, x, kept = mlp(), batch(), []
    model[2].register_forward_hook(lambda module, args, out: kept.append(out))

    def run():
        kept.clear()
        return mean_square(model(x)) + mean_square(kept[0])

    exact_or_refused(model, run, seed)


def test_frozen_parameters(seed):
    model, x = mlp(), batch()
    model[2].weight.requires_grad_(False)
    found, wanted = trial(model, lambda: mean_square(model(x)), seed)
    assert_same(found, wanted)


def test_frozen_parameters_by_functions(seed):
    model, x = mlp(), batch()
    model[2].weight.requires_grad_(False)
    wanted = plainly(seed, lambda: mean_square(model(x)), model)
    scaler = hu.AdaptiveGradScaler(model)
    assert_same(scrambled(seed, scaler, lambda: scaler.scale(mean_square(model(x))).backward(), model), wanted)
    model[2].weight.requires_grad_(True)
    wanted = plainly(seed, lambda: mean_square(model(x)), model)
    assert_same(scrambled(seed, scaler, lambda: scaler.scale(mean_square(model(x))).backward(), model), wanted)


def test_a_module_that_writes_into_its_argument_is_refused(seed):
    class Writing(nn.Linear):
        def forward(self, x):
            x.mul_(2)
            return super().forward(x)

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Writing(WIDTH, WIDTH))
    scaler = hu.AdaptiveGradScaler(model, mode="module")
    with pytest.raises(NotImplementedError, match=r"module '1' writes into its argument.*mode='function'"):
        scaler.scale(mean_square(model(batch()))).backward()


def test_a_module_that_raised_may_be_called_again(seed):
    class Moody(nn.Linear):
        bad = False

        def forward(self, x):
            if self.bad:
                raise KeyError("bad")
            return super().forward(x)

    model, x = nn.Sequential(*mlp(1), Moody(WIDTH, WIDTH), *mlp(1)), batch()
    wanted = plainly(seed, lambda: mean_square(model(x)), model)
    scaler = hu.AdaptiveGradScaler(model, mode="module")
    model[1].bad = True
    for _ in range(2):
        with pytest.raises(KeyError, match="bad"):
            model(x)
    model[1].bad = False
    assert_same(scrambled(seed, scaler, lambda: scaler.scale(mean_square(model(x))).backward(), model), wanted)


def test_a_pickled_copy_is_plain(seed):
    model, x = mlp(), batch()
    wanted = plainly(seed, lambda: mean_square(model(x)), model)
    scaler = hu.AdaptiveGradScaler(model, mode="module")
    scaler.scale(mean_square(model(x))).backward()
    clear(model)
    twin = pickle.loads(pickle.dumps(model))
    assert_same(plainly(seed, lambda: mean_square(twin(x)), twin), wanted)
    again = hu.AdaptiveGradScaler(twin, mode="module")
    assert_same(scrambled(seed, again, lambda: again.scale(mean_square(twin(x))).backward(), twin), wanted)


def test_a_deep_copy_is_plain(seed):
    model, x = mlp(), batch()
    wanted = plainly(seed, lambda: mean_square(model(x)), model)
    hu.AdaptiveGradScaler(model, mode="module")
    twin = copy.deepcopy(model)
    again = hu.AdaptiveGradScaler(twin, mode="module")
    assert_same(scrambled(seed, again, lambda: again.scale(mean_square(twin(x))).backward(), twin), wanted)


class Between(nn.Module):
    """Two layers whose first may keep what it makes, and whose second may read it."""

    def __init__(self, first: type[nn.Module], last: type[nn.Module]):
        super().__init__()
        self.first, self.last = first(WIDTH, WIDTH), last(WIDTH, WIDTH)
        # Not a part of the reader's.
        object.__setattr__(self.last, "source", self.first)

    def forward(self, x):
        return self.last(self.first(x))


class Keeping(nn.Linear):
    def forward(self, x):
        self.kept = super().forward(x)
        return self.kept.relu()


class Reading(nn.Linear):
    def forward(self, x):
        return super().forward(x) + self.source.kept


class Borrowing(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.source.weight, self.bias) @ self.weight


class Calling(nn.Linear):
    def forward(self, x):
        return super().forward(self.source(x))


LEAKS = [(Keeping, Reading, "'last'|'first'"), (nn.Linear, Borrowing, "'last'"), (nn.Linear, Calling, "'last'|'first'")]


@pytest.mark.parametrize(("first", "last", "match"), LEAKS, ids=["attribute", "parameter", "call"])
def test_what_goes_round_a_modules_border_is_refused(first, last, match, seed):
    model, x = Between(first, last), batch()
    scaler = hu.AdaptiveGradScaler(model, mode="module")
    with pytest.raises(ValueError, match=rf"module ({match}) reads or gives a tensor \([\w ]+\) by another way"):
        scaler.scale(mean_square(model(x)))
    assert all(p.grad is None for p in model.parameters())
    scaler.detach()
    mean_square(model(x)).backward()


def test_a_loss_of_what_a_module_kept_is_refused(seed):
    model, x = nn.Sequential(Keeping(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)), batch()
    scaler = hu.AdaptiveGradScaler(model, mode="module")
    model(x)
    with pytest.raises(ValueError, match=r"module '0' reads or gives"):
        scaler.scale(mean_square(model[0].kept))


@pytest.mark.parametrize("dims", [{}, {"kdim": 4, "vdim": 6}])
def test_attention_is_one_site(dims, seed):
    class Attending(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(WIDTH, WIDTH)
            self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True, **dims)

        def forward(self, x, k, v):
            return self.attention(self.first(x), k, v)[0]

    model = Attending()
    x, k, v = (
        torch.randn(3, 5, size, requires_grad=True)
        for size in (WIDTH, dims.get("kdim", WIDTH), dims.get("vdim", WIDTH))
    )
    found, wanted = trial(model, lambda: mean_square(model(x, k, v)), seed)
    assert_same(found, wanted)


def test_a_format_rounds_at_the_borders_of_attention(seed):
    model = nn.MultiheadAttention(WIDTH, 2)
    scaler = hu.AdaptiveGradScaler(model, mode="module", format="e5m2")
    x = torch.randn(5, 3, WIDTH)
    scaler.scale(mean_square(model(x, x, x)[0])).backward()
    assert list(sites(scaler)) == ["global", "model"]
    for parameter in model.parameters():
        assert torch.equal(hu.quantize(parameter.grad, "e5m2"), parameter.grad)


@dataclasses.dataclass
class Found:
    value: torch.Tensor


def test_data_classes_carry_gradients(seed):
    class Giving(nn.Linear):
        def forward(self, x):
            return Found(super().forward(x.value))

    model, x = nn.Sequential(Giving(WIDTH, WIDTH), Giving(WIDTH, WIDTH)), batch()
    found, wanted = trial(model, lambda: mean_square(model(Found(x)).value), seed)
    assert_same(found, wanted)


def test_a_module_that_calls_itself(seed):
    class Repeating(nn.Linear):
        def forward(self, x, times=3):
            return self(super().forward(x).tanh(), times - 1) if times else x

    model, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), Repeating(WIDTH, WIDTH)), batch()
    found, wanted = trial(model, lambda: mean_square(model(x)), seed)
    for key, gradient in wanted.items():
        assert (found[key] - gradient).norm() <= 1e-5 * gradient.norm(), key


def test_self_attention_is_told_that_its_arguments_are_one(seed):
    class Asking(nn.Linear):
        def forward(self, a, b):
            return super().forward(a) * (2 if a is b else 3)

    model, x = Asking(WIDTH, WIDTH), batch()
    found, wanted = trial(model, lambda: mean_square(model(x.requires_grad_(), x)), seed)
    assert_same(found, wanted)
    model = nn.TransformerEncoderLayer(WIDTH, 2, dim_feedforward=WIDTH, dropout=0.0)
    x = torch.randn(5, 3, WIDTH, requires_grad=True)
    found, wanted = trial(model, lambda: mean_square(model(x)), seed)
    for key, gradient in wanted.items():  # a residual stream is read twice
        assert (found[key] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-7, key


def test_two_threads_in_one_module_leave_its_parameters(seed):
    first, second = threading.Event(), threading.Event()

    class Slow(nn.Linear):
        def forward(self, x, name):
            if name == "first":
                first.set()
                second.wait(0.3)
            return super().forward(x)

    model, x = Slow(WIDTH, WIDTH), batch()
    hu.AdaptiveGradScaler(model, mode="module")
    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(model, x, "first")
        first.wait(60)
        other = pool.submit(model, x, "second")
        other.add_done_callback(lambda done: second.set())
        assert torch.equal(one.result(), other.result())
    assert all(type(p) is nn.Parameter for p in model.parameters())


@pytest.mark.parametrize("policy", ["underflow-bound", "element-wise", "abs-range"])
def test_policies_that_read_products_are_refused(policy):
    with pytest.raises(ValueError, match="mode='module' does not see"):
        hu.AdaptiveGradScaler(mlp(), mode="module", policy=policy)


MODES = ["function", "module"]


class Doing(nn.Module):
    """Two layers and what is done with them."""

    def __init__(self, forward):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self._does = forward

    def forward(self, x):
        return self._does(self, x)


# Of torch, which calls what it deprecates.
deprecated = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")


@deprecated
@pytest.mark.parametrize("mode", MODES)
def test_models_are_exported_and_traced_as_they_are(mode, seed):
    model, x = mlp(), batch()
    wanted = model(x)
    hu.AdaptiveGradScaler(model, mode=mode)
    assert same_bits(torch.export.export(model, (x,)).module()(x), wanted)
    traced = torch.jit.trace(model, (x,))
    assert same_bits(traced(x), wanted)
    assert "CloneBackward" not in str(traced(x).grad_fn)


@deprecated
@pytest.mark.parametrize("mode", MODES)
def test_forward_derivatives_are_plain(mode, seed):
    model, x, direction = mlp(), batch(), batch()
    wanted = jvp(model, (x,), (direction,))
    hu.AdaptiveGradScaler(model, mode=mode)
    for found, expected in zip(jvp(model, (x,), (direction,)), wanted):
        assert same_bits(found, expected)


@pytest.mark.parametrize("mode", MODES)
def test_an_ensemble_by_vmap_has_one_scale_and_is_told(mode, seed):
    base, x = mlp(), batch()
    parameters, _ = stack_module_state([mlp() for _ in range(3)])

    def run():
        return mean_square(vmap(lambda own: functional_call(base, own, (x,)))(parameters))

    wanted = torch.autograd.grad(run(), list(parameters.values()))
    scaler = hu.AdaptiveGradScaler(base, mode=mode)
    optimizer = torch.optim.SGD(parameters.values(), lr=0.0)
    scaler.scale(run()).backward()
    for parameter, gradient in zip(parameters.values(), wanted):
        assert same_bits(parameter.grad / scaler.get_scale(), gradient)
    with pytest.warns(UserWarning, match="came from no forward pass"):
        scaler.step(optimizer)


def inner_vmap(model, x):
    return model.last(vmap(model.first)(x))


def inner_grad(model, x):
    return model.last(x) + torch.func.grad(lambda z: model.first(z).sum())(x)


def inner_writes(model, x):
    h = model.first(x) * 1
    torch._foreach_mul_([h], 2.0)
    return model.last(h)


@pytest.mark.parametrize(
    ("forward", "match"),
    [
        (inner_vmap, "transform of torch.func"),
        (inner_grad, "transform of torch.func"),
        (inner_writes, "write into each"),
    ],
)
def test_what_cannot_be_watched_is_refused(forward, match, seed):
    model, x = Doing(forward), batch()
    hu.AdaptiveGradScaler(model)
    with pytest.raises(NotImplementedError, match=match):
        model(x)


@pytest.mark.parametrize("forward", [inner_vmap, inner_writes])
def test_modules_are_exact_around_what_cannot_be_watched(forward, seed):
    model, x = Doing(forward), batch()
    wanted = plainly(seed, lambda: mean_square(model(x)), model)
    scaler = hu.AdaptiveGradScaler(model, mode="module")
    assert_same(scrambled(seed, scaler, lambda: scaler.scale(mean_square(model(x))).backward(), model), wanted)


@torch.library.custom_op("halfulp_tests::product", mutates_args=())
def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """An operator whose backward pass is a custom Function that torch makes."""
    return x @ weight


product.register_autograd(
    lambda ctx, gradient: (gradient @ ctx.saved_tensors[1].T, ctx.saved_tensors[0].T @ gradient),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


@pytest.mark.parametrize("weight", ["parameter", "view", "made"])
@pytest.mark.parametrize("late", [False, True])
def test_operators_with_a_backward_pass_in_python_are_exact(weight, late, seed):
    """Theirs is a Function within a torch function; ``late``: in an iteration that watches no Function."""

    def forward(m, x):
        of = {"parameter": m.first.weight, "view": m.first.weight.T, "made": m.first.weight * m.last.weight}[weight]
        return m.last((product(m.first(x).tanh(), of) if m.uses else m.first(x)).tanh())

    model, x = Doing(forward), batch()
    model.uses = True
    wanted = plainly(seed, lambda: mean_square(model(x)), model)
    model.uses = not late
    scaler = hu.AdaptiveGradScaler(model)
    for _ in range(2):
        scaler.scale(mean_square(model(x))).backward()
        scaler._controller.backward.end_iteration()
    model.uses = True
    for _ in range(2):
        found = scrambled(seed, scaler, lambda: scaler.scale(mean_square(model(x))).backward(), model)
        assert_same(found, wanted)


def test_functional_calls_are_exact(seed):
    model, other, x = mlp(), mlp(), batch()
    own = dict(other.named_parameters())

    def run():
        return mean_square(functional_call(model, own, (x,)))

    wanted = plainly(seed, run, other)
    scaler = hu.AdaptiveGradScaler(model)
    assert_same(scrambled(seed, scaler, lambda: scaler.scale(run()).backward(), other), wanted)


def test_outputs_of_unknown_kinds_are_refused_at_the_loss(seed):
    class Box:
        def __init__(self, value):
            self.value = value

    model, x = Doing(lambda m, x: Box(m.last(m.first(x)))), batch()
    plain = copy.deepcopy(model)
    scaler = hu.AdaptiveGradScaler(model)
    with pytest.raises(ValueError, match="an object other than a list, tuple, dict or data class"):
        scaler.scale(mean_square(model(x).value))
    scaler.detach()
    mean_square(model(x).value).backward()
    mean_square(plain(x).value).backward()
    for a, b in zip(model.parameters(), plain.parameters()):
        assert same_bits(a.grad, b.grad)
    clear(model)
