"""An optimizer beside conversions of its model, and its end."""

import copy
import gc
import io
import weakref

import pytest
import torch

import halfulp as hu

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
            known = [optimizer._stream_ids[p] for p in parameters]
            model.to("cpu")
            if number == 2 and kind.startswith("plain"):
                model.double().float()
            gc.collect()
            assert all(now is then for now, then in zip(model.parameters(), parameters))
            assert [optimizer._stream_ids[p] for p in parameters] == known
            assert all(p in optimizer._plans and optimizer.state[p]["step"] == number + 1 for p in parameters)
        copied = copy.deepcopy(model)
        for parameter in copied.parameters():
            hu.optim.SGD([parameter], lr=1e-2)
        torch.save(parameters[0], io.BytesIO())
        held = [weakref.ref(one) for one in (optimizer, *parameters)]
        del model, optimizer, average, copied, parameters, parameter
        gc.collect()
        assert [one() for one in held] == [None] * len(held)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
