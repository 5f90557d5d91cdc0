"""A mapping from tensors: by identity, and no reason for a tensor to live."""

import copy
import gc
import io
import weakref

import pytest
import torch

import halfulp as hu
from halfulp.optim.parameters._tensor_map import TensorMap


def test_equal_tensors_are_different_keys():
    one, two = torch.zeros(2), torch.zeros(2)
    known = TensorMap([(one, 1), (two, 2)])
    known[one] = 3
    assert (known[one], known[two], len(known), list(known.values())) == (3, 2, 2, [3, 2])
    assert known.pop(one) == 3
    assert one not in known
    assert (known.get(one), known.pop(one)) == (None, None)
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


PARAMETERS = {
    "plain": lambda: torch.nn.Linear(8, 8),
    "plain, swapped": lambda: torch.nn.Linear(8, 8),
    "scaled": lambda: hu.scalify(torch.nn.Linear(8, 8)),
    "multicomponent": lambda: hu.multicomponent(torch.nn.Linear(8, 8), components=2, dtype=torch.bfloat16),
}


@pytest.mark.parametrize("kind", PARAMETERS)
def test_a_model_can_be_converted_beside_its_optimizer(kind, seed):
    """nn.Module swaps wrapper subclasses, and all parameters on demand, which forbids weak references to them."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(kind == "plain, swapped")
    try:
        model = PARAMETERS[kind]()
        optimizer = hu.optim.AdamW(model.named_parameters(), lr=1e-2)
        average = None if kind == "scaled" else hu.optim.EMA(model, optimizer=optimizer)
        parameters = list(model.parameters())
        for number in range(4):
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            if average is not None:
                average.update()
            optimizer.zero_grad()
            known = [optimizer._identities[p] for p in parameters]
            model.to("cpu")
            if number == 2 and kind.startswith("plain"):
                model.double().float()
            gc.collect()
            assert all(now is then for now, then in zip(model.parameters(), parameters))
            assert [optimizer._identities[p] for p in parameters] == known
            assert all(p in optimizer._plans and optimizer.state[p]["step"] == number + 1 for p in parameters)
        copied = copy.deepcopy(model)
        for parameter in copied.parameters():
            hu.optim.SGD([parameter], lr=1e-2)
        torch.save(parameters[0], io.BytesIO())
        known, held = optimizer._identities, weakref.ref(optimizer)
        del model, optimizer, average, copied, parameters, parameter
        gc.collect()
        assert held() is None
        assert len(known) == 0
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
