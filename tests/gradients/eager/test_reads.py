"""What a call reads of other sites: its nodes move the gradients, and the graph stays the plain one."""

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import handle_torch_function, has_torch_function

import halfulp as hu

from ..exponents import WIDTH, assert_same, batch, mean_square, plainly, scramble, scrambled


class Reading(nn.Module):
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
    model, x = Reading(READS[name]), batch()
    wanted = graph([model(x)])
    scaler = hu.AdaptiveGradScaler(model)
    (_, *found) = graph([model(x)])
    # Less the copy that leaves, behind which places are one further.
    assert found == [(kind, [None if i is None else i + 1 for i in places]) for kind, places in wanted]
    assert len(scaler._controller.sites) > 2


@pytest.mark.parametrize("name", READS)
def test_gradients_keep_their_bits(name, seed):
    model, x = Reading(READS[name]), batch()
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
    model, x = Reading(read), batch()
    wanted = plainly(seed, lambda: mean_square(model(x)), model)
    scaler = hu.AdaptiveGradScaler(model)
    found = scrambled(seed, scaler, lambda: scaler.scale(mean_square(model(x))).backward(), model)
    assert_same(found, wanted)


@pytest.mark.parametrize("older", [0, 1000])
def test_tensors_of_another_thread_are_no_nodes_of_the_call(older, seed):
    """Autograd numbers nodes in each thread by itself: those of the inputs may be above or below the call's."""
    model = Reading(READS["cosine_similarity"])
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
