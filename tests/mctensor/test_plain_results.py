"""Results that torch's own code would write into plain tensors: padded and packed sequences; others are refused."""

import pytest
import torch
from torch.nn.utils import rnn

from halfulp import MCTensor

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
LENGTHS = [3, 5, 1, 4]


def encoded(*shape, dtype=torch.float32, components=2):
    return MCTensor.encode(torch.randn(shape, dtype=torch.float64), components, dtype)


def same(found, wanted, near=0.0):
    assert isinstance(found, MCTensor)
    assert found.shape == wanted.shape
    near = max(near, 2.0**-26 if found.dtype == torch.float16 else 0.0)  # several scales become one
    return (found.decode() - wanted).abs().max().item() <= near


REFUSED = {
    "vander": lambda x: torch.vander(x),
    "linspace": lambda x: torch.linspace(x[0], 2.0, 3),
    "logspace": lambda x: torch.logspace(0.5, x[0], 3),
    "normal": lambda x: torch.normal(0.3, x.abs()),
    "pad_sequence": lambda x: rnn.pad_sequence([x, x]),
    "pack_padded_sequence": lambda x: rnn.pack_padded_sequence(x.reshape(2, 2, 1), torch.tensor([2, 2])),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_torch_writes_into_plain_tensors_is_refused(name, seed):
    with pytest.raises(NotImplementedError, match=rf"{name}.* writes one component into a plain tensor"):
        REFUSED[name](encoded(4))
