"""What both tensor classes share: copies of views, and calls that have no meaning for several plain tensors."""

import copy
import io
import pickle

import pytest
import torch

from halfulp.mctensor import MCTensor
from halfulp.scaled import ScaledTensor

MAKERS = {
    "scaled": ScaledTensor.encode,
    "components": lambda values: MCTensor.encode(values, 2, torch.float16),
    "components without a scale": lambda values: MCTensor.encode(values, 2, torch.float32),
}
every_maker = pytest.mark.parametrize("make", MAKERS.values(), ids=list(MAKERS))


def _pickled(x):
    return pickle.loads(pickle.dumps(x))


def _saved(x):
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("way", [_pickled, _saved, copy.deepcopy])
@every_maker
def test_copies_of_views_share_as_plain_ones_do(make, way):
    def write_after_copying(x):
        whole, view, detached = way([x, x[1:], x.detach()])
        whole.mul_(2.0**20)  # beyond what the scale holds
        return [each.tolist() for each in (whole, view, detached)]

    values = torch.tensor([1.0, 2.0, 3.0])
    assert write_after_copying(make(values)) == write_after_copying(values)


@every_maker
def test_a_python_function_is_not_called_on_memory_that_is_not_there(make):
    x = make(torch.ones(2))
    with pytest.raises(TypeError, match="decode"):
        x.apply_(abs)
    assert x.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    "call",
    [
        lambda x, y: x + y,
        lambda x, y: x * y,
        lambda x, y: x @ y,
        lambda x, y: torch.cat([x, y]),
        lambda x, y: torch.where(torch.tensor([True, False]), x, y),
        lambda x, y: x.copy_(y),
        lambda x, y: x.add_(y),
        lambda x, y: torch.nn.functional.linear(x, y[None]),
        lambda x, y: torch._foreach_add([x], [y]),
    ],
)
def test_the_two_classes_do_not_mix(call):
    x, y = ScaledTensor.encode(torch.ones(2)), MCTensor.encode(torch.ones(2))
    for one, other in ((x, y), (y, x)):
        with pytest.raises(NotImplementedError, match=r"takes no MCTensor beside a ScaledTensor.*decode"):
            call(one, other)
    assert x.tolist() == y.tolist() == [1.0, 1.0]
