"""Writes into views, and tensors that are no plain ones: what an edge must not get in the way of."""

import pytest
import torch
from torch import nn

import halfulp as hu
from halfulp.kernels import same_bits

from ..exponents import WIDTH, assert_same, batch, mean_square, plainly, scrambled


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
