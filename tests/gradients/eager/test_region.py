"""The region of a forward pass: what it must leave alone, and what it leaves behind, which is nothing."""

import copy
import gc
import pickle
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import _SingleLevelFunction
from torch.overrides import _get_current_function_mode_stack, handle_torch_function, has_torch_function
from torch.utils.checkpoint import checkpoint

import halfulp as hu
from halfulp.gradients.eager._backward import thread_region_state
from halfulp.kernels import same_bits

from ..exponents import (
    WIDTH,
    assert_same,
    batch,
    case_of,
    clear,
    gradients,
    mean_square,
    mlp,
    plainly,
    scramble,
    scrambled,
)


def assert_nothing_is_left():
    assert thread_region_state.region is None
    assert _get_current_function_mode_stack() == []
    assert "apply" not in vars(_SingleLevelFunction)


def watched(model, run, **options):
    """A scaler of the model, whose sites have random exponents."""
    scaler = hu.AdaptiveGradScaler(model, **options)
    scaler.scale(run()).backward()
    scramble(scaler)
    scaler._controller.backward.end_iteration()
    clear(model)
    return scaler


@pytest.mark.parametrize("name", ["hf-gpt2", "in-place-sums", "checkpoint-reentrant", "swish-function", "gru"])
def test_a_loss_that_was_not_scaled_has_true_gradients(name, seed):
    case = case_of(name, seed)
    wanted = plainly(seed, case.run, case.model)
    watched(case.model, case.run)
    assert_same(plainly(seed, case.run, case.model), wanted)


def test_hooks_see_true_gradients_of_a_loss_that_was_not_scaled(seed):
    model, x, seen = mlp(), batch().requires_grad_(), []

    def run():
        return mean_square(model(x))

    def look(module, args, out):
        out.register_hook(lambda gradient: seen.append(gradient.clone()))

    for layer in model:
        layer.register_forward_hook(look)
        layer.register_full_backward_hook(lambda module, into, out: seen.extend([*into, *out]))
    for p in model.parameters():
        p.register_hook(lambda gradient: seen.append(gradient.clone()))
        p.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    plainly(seed, run, model)
    wanted = [*seen]
    watched(model, run)
    seen.clear()
    plainly(seed, run, model)
    assert len(seen) == len(wanted) > 20
    # Parameters' gradients pass one more node, and may come a hook later.
    seen.sort(key=_order)
    wanted.sort(key=_order)
    assert all(same_bits(a, b) for a, b in zip(seen, wanted))


def _order(gradient):
    return tuple(gradient.shape), gradient.flatten().tolist()


def test_autograd_grad_without_scale_is_true(seed):
    model, x = mlp(), batch().requires_grad_()

    def run():
        return mean_square(model(x))

    wanted = torch.autograd.grad(run(), [x, *model.parameters()])
    watched(model, run)
    for a, b in zip(torch.autograd.grad(run(), [x, *model.parameters()]), wanted):
        assert torch.equal(a, b)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_evaluation_leaves_no_trace(context, seed):
    model, x = mlp(), batch()
    wanted = model(x).detach()
    scaler = hu.AdaptiveGradScaler(model)
    model.eval()
    with context():
        out = model(x)
    assert torch.equal(out, wanted)
    assert not vars(out)
    assert list(scaler._controller.sites) == ["global"]
    assert not scaler._controller.backward.forward_count
    assert_nothing_is_left()


def test_outputs_are_plain_tensors(seed):
    model, x = mlp(), batch()
    wanted = model(x).detach()
    hu.AdaptiveGradScaler(model)
    out = model(x)
    assert torch.equal(out, wanted)
    assert type(out) is torch.Tensor
    assert not vars(out)
    assert_nothing_is_left()


class Late(nn.Module):
    """Applies a custom Function, in place or not, from some iteration on."""

    def __init__(self):
        super().__init__()
        self.first, self.last, self.function, self.kept = mlp(1), mlp(1), None, None

    def forward(self, x):
        h = self.first(x)
        return self.last(h if self.function is None else self.function(h))


class Tripled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, in_place):
        if in_place:
            ctx.mark_dirty(x)
        return x.mul_(3) if in_place else 3 * x

    @staticmethod
    def backward(ctx, gradient):
        return 3 * gradient, None


def _written_in_part(h):
    h = h * 1
    Tripled.apply(h[1:], True)
    return h


LATE = {
    "a result": lambda h: Tripled.apply(h, False),
    "in place": lambda h: Tripled.apply(h * 1, True),
    "into a view": _written_in_part,
    "a checkpoint": lambda h: checkpoint(torch.tanh, h, use_reentrant=True),
}


@pytest.mark.parametrize("kind", LATE)
@pytest.mark.parametrize("measured", [False, True])
def test_a_custom_function_that_comes_late_is_watched(kind, measured, seed):
    model, x = Late(), batch()

    def run():
        return mean_square(model(x))

    scaler = watched(model, run)
    backward = scaler._controller.backward
    for function in (None, None, None, LATE[kind]):
        backward.is_measuring = measured
        model.function = function
        clear(model)
        if function is not None and measured and kind in ("in place", "into a view"):
            with pytest.raises(NotImplementedError, match="writes into its argument"):
                run()
            break
        plain = copy.deepcopy(model)
        wanted = plainly(seed, lambda plain=plain: mean_square(plain(x)), plain)
        scaler.scale(run()).backward()
        assert_same({key: g / scaler.get_scale() for key, g in gradients(model).items()}, wanted)
        backward.end_iteration()
    assert_nothing_is_left()


def test_what_a_custom_function_gave_may_be_kept(seed):
    model, x = Late(), batch()
    model.last.register_forward_hook(
        lambda layer, args, out: setattr(model, "kept", Tripled.apply(args[0], False) if model.function else None)
    )

    def run():
        out = mean_square(model(x))
        return out if model.kept is None else out + mean_square(model.kept)

    scaler = watched(model, run)
    model.function = lambda h: h
    for _ in range(2):
        clear(model)
        scaler.scale(run()).backward()
        found = {key: g / scaler.get_scale() for key, g in gradients(model).items()}
        scaler._controller.backward.end_iteration()
        assert_same(found, plainly(seed, run, model))


class Failing(nn.Module):
    """Raises on demand, deep inside, in forward or in backward."""

    def __init__(self):
        super().__init__()
        self.first, self.inner, self.where = mlp(1), nn.Sequential(*mlp(2)), None

    def forward(self, x):
        h = Raising.apply(self.first(x), self)
        return self.inner(h)


class Raising(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, model):
        ctx.model = model
        if model.where == "forward":
            raise model.error
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        if ctx.model.where == "backward":
            raise ctx.model.error
        return gradient, None


@pytest.mark.parametrize("error", [ValueError("here"), KeyboardInterrupt()], ids=["error", "interrupt"])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_exception_leaves_nothing_behind(where, error, seed):
    model, x = Failing(), batch()

    def run():
        return mean_square(model(x))

    wanted = plainly(seed, run, model)
    scaler = watched(model, run)
    model.where, model.error = where, error
    with pytest.raises(type(error)):
        scaler.scale(run()).backward()
    assert_nothing_is_left()
    model.where = None
    clear(model)
    assert_same(plainly(seed, run, model), wanted)
    scaler.scale(run()).backward()
    assert_same({key: g / scaler.get_scale() for key, g in gradients(model).items()}, wanted)
    assert_nothing_is_left()


def test_hooks_see_true_gradients_after_an_exception_in_backward(seed):
    model, x, seen = Failing(), batch(), []

    def run():
        return mean_square(model(x))

    def look(module, args, out):
        out.register_hook(lambda gradient: seen.append(gradient.clone()))

    for layer in model.inner:
        layer.register_forward_hook(look)
    run().backward()
    wanted = [*seen]
    scaler = watched(model, run)
    model.where, model.error = "backward", ValueError("here")
    with pytest.raises(ValueError, match="here"):
        scaler.scale(run()).backward()
    model.where = None
    seen.clear()
    run().backward()
    assert len(seen) == len(wanted) == 3
    assert all(same_bits(a, b) for a, b in zip(seen, wanted))


@pytest.mark.parametrize("reentrant", [False, True])
def test_the_whole_model_under_checkpoint(reentrant, seed):
    model, x = mlp(), batch().requires_grad_()

    def run():
        return mean_square(checkpoint(model, x, use_reentrant=reentrant))

    wanted = plainly(seed, run, model)
    scaler = hu.AdaptiveGradScaler(model)
    assert_same(scrambled(seed, scaler, lambda: scaler.scale(run()).backward(), model), wanted)


@pytest.mark.parametrize("name", ["checkpoint-reentrant", "checkpoint-non-reentrant"])
def test_checkpoints_inside_under_autocast(name, seed):
    case = case_of(name, seed)

    def run():
        with torch.autocast("cpu", torch.bfloat16):
            return case.run()

    wanted = plainly(seed, run, case.model)
    scaler = hu.AdaptiveGradScaler(case.model)
    assert_same(scrambled(seed, scaler, lambda: scaler.scale(run()).backward(), case.model), wanted)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_are_plain_models(copied, seed):
    model, x = mlp(), batch()
    wanted = plainly(seed, lambda: mean_square(model(x)), model)
    watched(model, lambda: mean_square(model(x)))
    twin = copied(model)
    assert_same(plainly(seed, lambda: mean_square(twin(x)), twin), wanted)
    assert all(not p._backward_hooks for p in twin.parameters())
    own = hu.AdaptiveGradScaler(twin)
    assert_same(scrambled(seed, own, lambda: own.scale(mean_square(twin(x))).backward(), twin), wanted)


def test_detach_gives_the_plain_model_back(seed):
    case = case_of("hf-gpt2", seed)
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in case.model.modules()]
    wanted = plainly(seed, case.run, case.model)
    scaler = watched(case.model, case.run)
    scaler.detach()
    assert "forward" not in vars(case.model)
    assert [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in case.model.modules()] == hooks
    assert_same(plainly(seed, case.run, case.model), wanted)
    again = hu.AdaptiveGradScaler(case.model)
    found = scrambled(seed, again, lambda: again.scale(case.run()).backward(), case.model)
    assert found.keys() == wanted.keys()


def in_thread(run):
    """What ``run()`` returns in a thread of its own, where autograd numbers nodes anew."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result()


def test_forward_input_and_loss_in_three_threads(seed):
    model, x = mlp(), batch().requires_grad_()

    def run(call):
        made = call(lambda: x * 2 + 1)
        out = call(lambda: model(made))
        return call(lambda: mean_square(out + out.tanh().exp()))

    wanted = plainly(seed, lambda: run(lambda f: f()), model)
    scaler = hu.AdaptiveGradScaler(model)
    found = scrambled(seed, scaler, lambda: scaler.scale(run(in_thread)).backward(), model)
    assert_same(found, wanted)


class Meeting(nn.Module):
    """Waits inside its forward pass until another thread is inside of one, too."""

    def __init__(self, barrier, function):
        super().__init__()
        self.first, self.last, self.barrier, self.function = mlp(1), mlp(1), barrier, function

    def forward(self, x):
        h = self.first(x)
        self.barrier.wait(60)
        h = h * 1 if self.function is None else self.function(h)
        self.barrier.wait(60)
        return self.last(h)


@pytest.mark.parametrize("functions", [(True, True), (True, False)], ids=["both apply one", "one applies one"])
def test_two_scalers_in_two_threads_watch_custom_functions_apart(functions, seed):
    """While one thread's Function goes through its region, the other thread's go through theirs, or through none."""
    barrier = threading.Barrier(2)

    def trained(number):
        generator = torch.Generator().manual_seed(seed + number)
        model = Meeting(barrier, LATE["a result"] if functions[number] else None)
        for p in model.parameters():
            nn.init.normal_(p, generator=generator)
        x = torch.randn(5, model.first[0].in_features, generator=generator)
        mean_square(model(x)).backward()
        wanted = gradients(model)
        scaler = hu.AdaptiveGradScaler(model)
        for _ in range(3):
            clear(model)
            scaler.scale(mean_square(model(x))).backward()
            found = {key: g / scaler.get_scale() for key, g in gradients(model).items()}
            assert_same(found, wanted)
            scramble(scaler)
            scaler._controller.backward.end_iteration()

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(trained, number) for number in range(2)]:
            done.result()
    assert_nothing_is_left()


def test_no_reference_is_lost(seed):
    """In Python 3.11, which counts those of None; torch 2.6 loses one where it says whether something is compiled."""
    model, x = mlp(), batch()
    hu.AdaptiveGradScaler(model)
    model(x)
    gc.collect()
    before = sys.getrefcount(None)
    for _ in range(100):
        model(x)
    assert sys.getrefcount(None) > before - 100


@pytest.mark.parametrize("end", ["forward", "backward", "error"])
def test_a_checkpoint_that_runs_again_in_backward_does_not_keep_the_graph(end, seed):
    model, kept = nn.Sequential(nn.Linear(WIDTH, WIDTH), mlp(), nn.Linear(WIDTH, WIDTH)), []
    inner = model[1].forward

    def note(x):
        kept.append(weakref.ref(x))
        return x

    def run(x):
        return checkpoint(inner, note(x), use_reentrant=True)

    model[1].forward = lambda x: checkpoint(run, note(x * 2), use_reentrant=True)
    scaler = hu.AdaptiveGradScaler(model)
    if end == "error":
        model[2].register_forward_pre_hook(lambda *_: 1 / 0)
    for _ in range(3):
        try:
            loss = mean_square(model(batch()))
        except ZeroDivisionError:
            continue
        if end == "backward":
            scaler.scale(loss).backward()
        del loss
    gc.collect()
    assert len(kept) >= 6
    assert [one for one in kept if one() is not None] == []


def test_what_another_thread_kept_from_inside_is_refused(seed):
    model, kept = mlp(), []
    model[1].register_forward_hook(lambda module, args, out: kept.append(out))
    scaler = hu.AdaptiveGradScaler(model)
    in_thread(lambda: model(batch()))
    with pytest.raises(ValueError, match="from inside the model"):
        scaler.scale(mean_square(kept[0]))


class Written(nn.Module):
    """Two products, and something that is written into what they made."""

    def __init__(self, write):
        super().__init__()
        self.left, self.right, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.write = write

    def forward(self, x):
        left, right = self.left(x) * 1, self.right(x) * 1
        return self.last(self.write(left, right))


def select_number(a, b):
    a[0, 0].mul_(2)
    return a + b


def atleast(a, b):
    a, b = torch.atleast_2d(a, b)
    return a.mul_(3) + b.exp_()


def columns(a, b):
    a[:, 2:4] = b[:, :2]
    a[:, 5].mul_(b[:, 0])
    return a.t().add_(b.t()).t()


def broadcast(a, b):
    a, b = torch.broadcast_tensors(a.mul_(2), b[:1])
    return a + b


@pytest.mark.parametrize(
    "write",
    [
        columns,
        broadcast,
        select_number,
        atleast,
    ],
)
def test_writes_into_views_reach_their_base(write, seed):
    model, x = Written(write), batch()
    output = model(x).detach()
    wanted = plainly(seed, lambda: mean_square(model(x)), model)
    scaler = hu.AdaptiveGradScaler(model)
    assert same_bits(model(x).detach(), output)
    try:
        found = scrambled(seed, scaler, lambda: scaler.scale(mean_square(model(x))).backward(), model)
    except NotImplementedError:
        return
    assert_same(found, wanted)


def test_a_sparse_embedding_that_is_read_twice(seed):
    class Twice(nn.Sequential):
        def forward(self, ids):
            return self[1](self[0](ids) + self[0](ids + 1))

    model, ids = Twice(nn.Embedding(WIDTH, WIDTH, sparse=True), nn.Linear(WIDTH, WIDTH)), torch.arange(4)
    wanted = plainly(seed, lambda: mean_square(model(ids)), model)
    scaler = hu.AdaptiveGradScaler(model)
    assert_same(scrambled(seed, scaler, lambda: scaler.scale(mean_square(model(ids))).backward(), model), wanted)


def test_nested_tensors_are_exact(seed):
    class Ragged(nn.Sequential):
        def forward(self, x):
            nested = torch.nested.nested_tensor([x[:1], x[1:]], layout=torch.jagged)
            return torch.nested.to_padded_tensor(self[1](self[0](nested).relu()), 0.0)

    model, x = Ragged(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)), batch()
    wanted = plainly(seed, lambda: mean_square(model(x)), model)
    scaler = watched(model, lambda: mean_square(model(x)))
    torch.manual_seed(seed)
    scaler.scale(mean_square(model(x))).backward()
    scaler.step(torch.optim.SGD(model.parameters(), lr=0.0))
    assert_same(gradients(model), wanted)


def penalised(model, x, scaler):
    """Torch's own recipe: the norm of the input's gradient, unscaled by hand."""
    loss = mean_square(model(x))
    gradient = torch.autograd.grad(scaler.scale(loss), x, create_graph=True)[0] / scaler.get_scale()
    scaler.scale(loss + (gradient.norm() - 1).square()).backward()


def test_a_gradient_penalty_is_grad_scalers_and_said_once(seed):
    model, x = mlp(), batch().requires_grad_()
    penalised(model, x, torch.amp.GradScaler("cpu", init_scale=2.0**12))
    wanted = gradients(model)
    clear(model)
    scaler = hu.AdaptiveGradScaler(model, init_scale=2.0**12)
    opt = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler.scale(mean_square(model(x))).backward()
    scramble(scaler)
    scaler._controller.sites.global_site.exponent = 12
    scaler._controller.backward.end_iteration()
    clear(model)
    with pytest.warns(UserWarning, match="create_graph=True") as said:
        penalised(model, x, scaler)
    assert len(said) == 1
    assert_same(gradients(model), wanted)
    scaler.step(opt)
    scaler.update()
    clear(model)
    penalised(model, x, scaler)  # a second warning would be an error


class Forces(nn.Module):
    """An energy and its gradient by the positions."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))

    def forward(self, x):
        x = x.clone().requires_grad_()
        energy = self.net(x).sum()
        return energy, torch.autograd.grad(energy, x, create_graph=True)[0]


def unscaled_penalty(model, x):
    x = x.clone().requires_grad_()
    loss = mean_square(model(x))
    return loss + torch.autograd.grad(loss, x, create_graph=True)[0].square().sum()


def forces(model, x):
    energy, force = model(x)
    return energy + mean_square(force)


@pytest.mark.filterwarnings("ignore:gradients are taken with create_graph:UserWarning")
@pytest.mark.parametrize(
    ("make", "loss"),
    [pytest.param(mlp, unscaled_penalty, id="penalty"), pytest.param(Forces, forces, id="forces")],
)
@pytest.mark.filterwarnings("ignore:a gradient of the scaled loss")
def test_gradients_of_gradients_are_exact_or_refused(make, loss, seed):
    model, x = make(), batch()
    wanted = plainly(seed, lambda: loss(model, x), model)
    scaler = hu.AdaptiveGradScaler(model)
    try:
        found = scrambled(seed, scaler, lambda: scaler.scale(loss(model, x)).backward(), model)
    except (ValueError, NotImplementedError):
        return
    for key, gradient in wanted.items():
        assert (found[key] - gradient).norm() <= 1e-4 * gradient.norm(), key


class GradientReading(nn.Module):
    """Two layers, the second of which reads the first one's result and the parameter by a function of one call."""

    def __init__(self, read):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.vector, self.read = nn.Parameter(torch.randn(WIDTH)), read

    def forward(self, x):
        x = self.first(x)
        y = self.last(x)
        return self.read(x, y, self.vector) + x * self.vector


def in_place(x, y, v):
    y = y * 1
    y[1:3] = x[:2]
    return y.mul_(v)


READS = {
    "outer": lambda x, y, v: torch.outer(x[0], y[0])[:4] @ torch.outer(v, v),
    "cosine_similarity": lambda x, y, v: F.cosine_similarity(x, y, 0) * F.cosine_similarity(y, x, 1)[:, None],
    "einsum": lambda x, y, v: torch.einsum("ij,ik,j->ik", x, y, v),
    "in place": in_place,
    "attention": lambda x, y, v: F.scaled_dot_product_attention(y[None], x[None], x[None])[0],
}


def graph(outputs):
    """The names of nodes and what they read, by the order in which a walk meets them."""
    found, pending = {}, [x.grad_fn for x in outputs]
    for node in pending:
        if node is not None and node not in found:
            found[node] = len(found)
            pending += [following for following, _ in node.next_functions]
    return [(node.name(), [found.get(one) for one, _ in node.next_functions]) for node in found]


@pytest.mark.parametrize("name", READS)
def test_the_graph_is_the_plain_one(name, seed):
    model, x = GradientReading(READS[name]), batch()
    wanted = graph([model(x)])
    scaler = hu.AdaptiveGradScaler(model)
    (_, *found) = graph([model(x)])
    # Less the copy that leaves, behind which places are one further.
    assert found == [(kind, [None if i is None else i + 1 for i in places]) for kind, places in wanted]
    assert len(scaler._controller.sites) > 2


@pytest.mark.parametrize("name", READS)
def test_gradients_keep_their_bits(name, seed):
    model, x = GradientReading(READS[name]), batch()
    wanted = plainly(seed, lambda: mean_square(model(x)), model)
    scaler = hu.AdaptiveGradScaler(model)
    found = scrambled(seed, scaler, lambda: scaler.scale(mean_square(model(x))).backward(), model)
    assert_same(found, wanted)


def second(x, y):
    """A function that gives one of its arguments back."""
    if has_torch_function((x, y)):
        return handle_torch_function(second, (x, y), x, y)
    return y


@pytest.mark.parametrize("read", [lambda x, y, v: second(y, x) * y, lambda x, y, v: second(y, v) * y])
def test_an_argument_that_is_given_back_stays_at_its_site(read, seed):
    model, x = GradientReading(read), batch()
    wanted = plainly(seed, lambda: mean_square(model(x)), model)
    scaler = hu.AdaptiveGradScaler(model)
    found = scrambled(seed, scaler, lambda: scaler.scale(mean_square(model(x))).backward(), model)
    assert_same(found, wanted)


@pytest.mark.parametrize("older", [0, 1000])
def test_tensors_of_another_thread_are_no_nodes_of_the_call(older, seed):
    """Autograd numbers nodes in each thread by itself: those of the inputs may be above or below the call's."""
    model = GradientReading(READS["cosine_similarity"])
    source, made = torch.randn(4, WIDTH, requires_grad=True), []

    def make():
        x = source
        for _ in range(older + 1):
            x = x * 1
        made.append(x)

    def run():
        made.clear()
        thread = threading.Thread(target=make)
        thread.start()
        thread.join()
        return mean_square(model(made[0]) * made[0])

    wanted = plainly(seed, run, model), source.grad
    source.grad = None
    scaler = hu.AdaptiveGradScaler(model)
    scaler.scale(run()).backward()
    scramble(scaler)
    scaler._controller.backward.end_iteration()
    source.grad = None
    found = scrambled(seed, scaler, lambda: scaler.scale(run()).backward(), model)
    assert_same(found, wanted[0])


def test_a_leaf_under_autocast_is_cast_for_each_call(seed):
    """The cast of a leaf is kept under autocast, and would be shared by calls at several sites."""
    x = batch().requires_grad_()

    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.heads = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

        def forward(self, x):
            return sum(head(x) for head in self.heads)

    heads = Heads()
    (wanted,) = torch.autograd.grad(mean_square(heads(x)), x)
    scaler = hu.AdaptiveGradScaler(heads)
    for _ in range(2):
        with torch.autocast("cpu", torch.float16):
            loss = mean_square(heads(x))
        (found,) = torch.autograd.grad(scaler.scale(loss), x)
        assert (found / scaler.get_scale() - wanted).norm() < 0.01 * wanted.norm()
        scaler.set_exponents({"global": 5, "heads.0": 3, "heads.1": 9})
