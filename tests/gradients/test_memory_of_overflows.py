"""What the scaler remembers of overflows: for how long, of which sites, and over several optimizers and processes."""

import pytest
import torch
from torch import nn

import halfulp as hu
from halfulp.gradients import _controller
from halfulp.gradients._controller import downstream
from halfulp.gradients._site import Site

from .exponents import batch, clear, mean_square, mlp


@pytest.mark.parametrize("policy", ["amax", "dynamic", "underflow-bound"])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("again", ["unscale_", "step"])
def test_a_found_infinity_never_clears_within_an_iteration(policy, order, again, seed):
    """Whatever finite gradients are looked at afterwards, by whichever optimizer."""
    model = nn.Sequential(*mlp(2))
    scaler = hu.AdaptiveGradScaler(model, policy=policy, format="fp16")
    halves = [list(model[0].parameters()), list(model[2].parameters())]
    opts = [torch.optim.SGD(half, lr=0.1) for half in halves]
    scaler.scale(mean_square(model(batch()))).backward()
    halves[order[0]][0].grad[0, 0] = torch.inf
    before = [parameter.detach().clone() for parameter in model.parameters()]
    scaler.unscale_(opts[order[0]])
    halves[order[0]][0].grad.nan_to_num_(posinf=0.0)  # clipping may hide it
    if again == "unscale_":
        scaler.unscale_(opts[order[1]])
    scaler.step(opts[order[0]])
    assert not scaler.last_step.applied
    scaler.step(opts[order[1]])
    scaler.update()
    touched = [not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
    assert touched == [order[0] == 1, order[0] == 1, order[0] == 0, order[0] == 0]


def test_the_memory_of_an_overflow_ends(seed):
    model = nn.Sequential(*mlp(2))
    interval = 2
    scaler = hu.AdaptiveGradScaler(model, format="fp16", interval=interval)
    opt, x = torch.optim.SGD(model.parameters(), lr=0.0), batch()

    def iterate():
        clear(model)
        scaler.scale(mean_square(model(x))).backward()
        scaler.step(opt)
        scaler.update()

    for _ in range(8):
        iterate()
    every = list(scaler._controller.sites)
    before = {site: site.exponent for site in every}
    for site in every:
        # Once might have been a spike that is gone.
        scaler._controller._note(site)
        scaler._controller._note(site)
        scaler._controller._lower(site)
    remembered = _controller._MEMORY * interval
    for step in range(remembered - 1):
        iterate()
        assert step < 2 * interval or all(site.exponent <= before[site] - 4 for site in every)
    for _ in range(2 * interval):
        iterate()
    assert all(site.overflow is None for site in every)
    for _ in range(8 * 2 * interval):
        iterate()
    assert {site: site.exponent for site in every} == before


def test_everything_after_the_first_culprit_in_backward_is_downstream():
    order = [Site(f"site {k}", None, 0) for k in range(5)]
    assert downstream([], order) == []
    for k, site in enumerate(order):
        assert downstream([site], order) == order[:k]
        for other in order[:k]:
            assert downstream([other, site], order) == downstream([site, other], order) == order[:k]
    assert downstream([Site("elsewhere", None, 0)], order) == []


AGREE = """
import os, sys, torch
import torch.distributed as dist
from halfulp.gradients._processes import Processes

rank, path = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method="file://" + path, rank=rank, world_size=2)
processes = Processes()
processes._add(dist.group.WORLD)
for pair in ((3, -5), (-5, 3), (7, 7), (0, 60), (-60, -30)):
    assert processes.agreed("update", 7, [pair[rank], rank], lambda: torch.device("cpu")) == [min(pair), 0], pair
dist.barrier()
dist.destroy_process_group()
os._exit(0)
"""


def test_processes_agree_on_the_least_exponent(in_two_processes):
    in_two_processes(AGREE)


def test_an_overflow_that_was_another_sites_leaves_no_trace():
    """A site that is suspected twice in a row, and was neither time the one, is not held down for twice as long."""
    site = Site("0", Site("global", None, 16), 14)
    site.note_overflow(16, 32, 14, doubted=True)
    assert site.until == 48
    site.acquit()
    assert (site.overflow, site.until, site.patience) == (None, 0, 1)
    site.note_overflow(17, 32, 14, doubted=True)
    assert (site.until, site.patience) == (49, 1)
    # One of its own after that counts in full, and the next one soon after it twice.
    site.note_overflow(18, 32, 12, doubted=False)
    site.forget_overflow()
    site.note_overflow(60, 32, 12, doubted=True)
    assert (site.until, site.patience) == (60 + 64, 2)
    site.acquit()
    assert (site.until, site.patience) == (50, 1)
