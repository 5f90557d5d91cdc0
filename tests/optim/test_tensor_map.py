"""A mapping from tensors: by identity, and no reason for a tensor to live."""

import gc
import weakref

import torch

from halfulp.optim._tensor_map import TensorMap


def test_equal_tensors_are_different_keys():
    one, two = torch.zeros(2), torch.zeros(2)
    known = TensorMap([(one, 1), (two, 2)])
    known[one] = 3
    assert (known[one], known[two], len(known), list(known.values())) == (3, 2, 2, [3, 2])
    assert known.pop(one) == 3
    assert one not in known
    assert (known.get(one, 7), known.pop(one)) == (7, None)
    known[one] = 4
    assert known[one] == 4


def test_entries_go_with_their_tensors_also_out_of_cycles():
    plain, cyclic = torch.zeros(2), torch.nn.Parameter(torch.zeros(2))
    cyclic.itself = cyclic
    known = TensorMap([(plain, object()), (cyclic, object())])
    values = [weakref.ref(tensor) for tensor in (plain, cyclic)]
    del plain
    assert len(known) == 1
    del cyclic
    gc.collect()
    assert len(known) == 0
    assert all(value() is None for value in values)


def test_a_tensor_that_only_a_graph_holds_keeps_its_entry():
    weight = torch.nn.Parameter(torch.ones(2))
    known = TensorMap([(weight, "weight")])
    loss = (weight * 2).sum()
    del weight
    gc.collect()
    held = loss.grad_fn.next_functions[0][0].next_functions[0][0].variable
    assert known[held] == "weight"
    del held, loss
    gc.collect()
    assert len(known) == 0
