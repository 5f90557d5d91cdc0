"""Exact sums of MCTensors, batches of them from a DataLoader, rounding at ties: against exact rationals."""

from fractions import Fraction

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from halfulp.arithmetic import exact_dot, exact_partial, exact_round, exact_sum, merge
from halfulp.mctensor import MCTensor

FORMS = [(2, torch.bfloat16), (2, torch.float16), (2, torch.float32), (2, torch.float64), (3, torch.float32)]


def exact(x: MCTensor) -> Fraction:
    """The value of one element."""
    scale = 1 if x.scale is None else Fraction(float(x.scale))
    return scale * sum(Fraction(float(part)) for part in x.components)


def terms(shape: tuple, components: int, dtype: torch.dtype) -> MCTensor:
    wide = torch.randn(shape, dtype=torch.float64) * 2.0 ** torch.randint(-6, 6, shape)
    return MCTensor.encode(wide, components, dtype) / 3


@pytest.mark.parametrize(("components", "dtype"), FORMS)
def test_sums_and_products_are_rounded_once(components, dtype, seed):
    x, y = terms((30, 3), components, dtype), terms((30, 3), components, dtype)
    unit = Fraction(torch.finfo(dtype).eps / 2) ** components
    spacing = Fraction(torch.finfo(dtype).smallest_normal) * Fraction(torch.finfo(dtype).eps)

    def is_rounded_once(found: MCTensor, wanted: Fraction) -> bool:
        # A sum that nearly cancels ends among the subnormal numbers of its last component.
        scale = 1 if found.scale is None else Fraction(float(found.scale))
        return abs(exact(found) - wanted) <= max(abs(wanted) * unit, scale * spacing / 2)

    for column in range(3):
        assert is_rounded_once(exact_sum(x, 0)[column], sum(exact(x[row, column]) for row in range(30)))
    wanted = sum(exact(p) * exact(q) for p, q in zip(x.flatten(), y.flatten()))
    assert is_rounded_once(exact_dot(x, y), wanted)
    shuffled = torch.randperm(30)
    assert torch.equal(exact_sum(x[shuffled], 0), exact_sum(x, 0))
    assert exact_sum(x, (0, 1), keepdim=True).shape == (1, 1)


def test_partials_and_gradients(seed):
    x, y = terms((40,), 2, torch.float64), terms((40,), 2, torch.float64)
    words = exact_partial(x[:11]) + exact_partial(x[11:])
    assert float(exact_round(words)) == float(exact_sum(x).decode())
    x = x.with_gradients("components").requires_grad_()
    gradient = torch.autograd.grad(exact_sum(x) * 2 + exact_dot(x, y), x)[0]
    assert torch.equal(gradient, y + 2)


def test_infinities_and_nans():
    for value, wanted in (("inf", float("inf")), ("nan", float("nan"))):
        found = exact_sum(MCTensor.encode([1.0, float(value)], 2, torch.float64))
        assert found.components[0].isclose(torch.tensor(wanted, dtype=torch.float64), equal_nan=True)


def test_a_value_beyond_a_tie_is_rounded_away(seed):
    for first in (1.0, 1.0 + 2**-52, -3.0, 2.0**-1000):
        for side in (-1.0, 1.0):
            for last in (-(2.0**-110), 0.0, 2.0**-110):
                parts = [first, side * abs(first) * 2.0**-53, last * abs(first)]
                wanted = float(sum(map(Fraction, parts)))
                assert float(merge(tuple(torch.tensor(p, dtype=torch.float64) for p in parts))) == wanted, parts


class Items(Dataset):
    """Elements whose digits no single component holds."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        x = MCTensor.encode([f"{index}.1", "1e-30"], 3, torch.float32)
        return {"x": x, "h": MCTensor.encode([f"{index}.1"], 2, torch.float16)}


@pytest.mark.parametrize("workers", [0, 2])
def test_a_data_loader_keeps_all_components(workers):
    loader = DataLoader(Items(), batch_size=2, num_workers=workers, multiprocessing_context="fork" if workers else None)
    for number, batch in enumerate(loader):
        for name in ("x", "h"):
            assert torch.equal(batch[name], torch.stack([Items()[2 * number + k][name] for k in range(2)]))
