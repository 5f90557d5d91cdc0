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


OUT_OF_RANGE = {
    "index_add": lambda x, at, rows: x.index_add(0, at, rows),
    "index_add_": lambda x, at, rows: x.clone().index_add_(0, at, rows),
    "scatter_add": lambda x, at, rows: x.scatter_add(0, at[:, None].expand(rows.shape), rows),
    "index_put": lambda x, at, rows: x.index_put((at,), rows, accumulate=True),
    "index_copy": lambda x, at, rows: x.index_copy(0, at, rows),
    "index_fill": lambda x, at, rows: x.index_fill(0, at, 1.0),
    "index_select": lambda x, at, rows: x.index_select(0, at),
    "gather": lambda x, at, rows: x.gather(0, at[:, None].expand(rows.shape)),
    "embedding": lambda x, at, rows: torch.nn.functional.embedding(at, x),
}


@pytest.mark.parametrize("number", [-4, -1, 3, 4])
@pytest.mark.parametrize("name", OUT_OF_RANGE)
def test_an_index_out_of_range_is_refused_where_torch_refuses_it(name, number, seed):
    x, rows, at = *torch.randn(2, 3, 2, dtype=torch.float64), torch.tensor([number, 0, 1])
    components = [MCTensor.encode(part, 2) / 3 for part in (x, rows)]
    try:
        wanted = OUT_OF_RANGE[name](x / 3, at, rows / 3)
    except (IndexError, RuntimeError):
        with pytest.raises((IndexError, RuntimeError)):
            OUT_OF_RANGE[name](components[0], at, components[1])
    else:
        assert torch.allclose(OUT_OF_RANGE[name](components[0], at, components[1]).decode(), wanted)
