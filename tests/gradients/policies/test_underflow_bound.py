"""The bound of policy "underflow-bound", by simulation: of random products and losses few enough numbers become 0."""

import random

import pytest

from halfulp.gradients import UnderflowBound
from halfulp.gradients._site import Site
from halfulp.gradients.policies._underflow_bound import Proposal


@pytest.mark.parametrize("format", ["fp16", "e5m2"])
@pytest.mark.parametrize("trial", range(20))
def test_a_product_and_a_loss_keep_the_bound(format, trial, seed):
    """A sample of what `python -m benchmarks.bench_underflow_bound` tries."""
    trials = pytest.importorskip("benchmarks._underflow_trials", reason="the benchmarks are not installed")
    random.seed(seed + trial)
    for kind in trials.KINDS:
        found = trials.tried(kind, format)
        assert found.held, f"{found.zeros:.2%} of the gradient of a {kind} become 0"


def test_the_largest_demand_holds_and_then_the_smallest_limit(seed):
    policy, global_site = UnderflowBound(), Site("global", None, 0)
    site = Site("matmul", global_site, 3)
    for proposals, wanted in (([(5, 20), (9, 30)], 9), ([(5, 7), (9, 30)], 7), ([(2, 1)], 1), ([], None)):
        site.proposals = [Proposal(*one) for one in proposals]
        assert policy.exponent(site) == wanted
