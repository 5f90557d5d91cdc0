"""torch keeps compiled graphs between processes: under a name that tells of all that made them."""

import pytest
import torch

from halfulp.mctensor import MCTensor
from halfulp.scaled import ScaledTensor
from halfulp.subclass import _identity as graph_cache
from halfulp.subclass import graph_key, strict

KINDS = {"MCTensor": lambda x: MCTensor.encode(x), "ScaledTensor": lambda x: ScaledTensor.encode(x)}


def _rule() -> None:
    """Somebody else's."""


@pytest.mark.parametrize("make", KINDS.values(), ids=list(KINDS))
def test_the_key_tells_what_a_graph_depends_on(make):
    x = make(torch.ones(3, 2))
    key = x._stable_hash_for_caching()
    assert key == make(torch.zeros(3, 2))._stable_hash_for_caching()
    others = [make(torch.ones(2, 3)), make(torch.ones(3, 2, dtype=torch.float64)), make(torch.ones(2, 3)).t()]
    others += [make(torch.ones(3, 2)).requires_grad_(), make(torch.ones(4, 2))[1:]]
    found = {other._stable_hash_for_caching() for other in others}
    assert len(found) == len(others)
    assert key not in found
    with strict():
        assert x._stable_hash_for_caching() != key


def test_storages_differ():
    keys = {ScaledTensor.encode(torch.ones(2), d)._stable_hash_for_caching() for d in (torch.float16, torch.bfloat16)}
    assert len(keys) == 2


def test_rules_of_others_keep_a_graph_in_its_process(monkeypatch):
    x = ScaledTensor.encode(torch.ones(2))
    own, foreign = graph_key(x, [graph_key]), graph_key(x, [graph_key, _rule])
    monkeypatch.setattr(graph_cache, "_PROCESS_ID", "another")
    assert graph_key(x, [graph_key]) == own
    assert graph_key(x, [graph_key, _rule]) != foreign


def test_other_code_is_another_key(monkeypatch):
    x = ScaledTensor.encode(torch.ones(2))
    key = x._stable_hash_for_caching()
    monkeypatch.setattr(graph_cache, "_digest_sources", lambda: "edited")
    assert x._stable_hash_for_caching() != key
