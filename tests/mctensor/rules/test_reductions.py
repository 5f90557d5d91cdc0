"""Exact sums of MCTensors, batches of them from a DataLoader, rounding at ties: against exact rationals."""

from fractions import Fraction

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from halfulp.arithmetic import exact_partial, exact_round, exact_sum, merge
from halfulp.mctensor import MCTensor


def exact(x: MCTensor) -> Fraction:
    """The value of one element."""
    scale = 1 if x.scale is None else Fraction(float(x.scale))
    return scale * sum(Fraction(float(part)) for part in x.components)


def test_exact_sums_take_components_one_by_one(seed):
    x = MCTensor.encode(torch.randn(40, dtype=torch.float64), 2, torch.float64) / 3
    with pytest.raises(TypeError, match=r"exact_partial of each of x\.components"):
        exact_sum(x)
    words = sum(exact_partial(part) for part in x.components)
    assert float(exact_round(words)) == float(sum(map(exact, x)))


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
