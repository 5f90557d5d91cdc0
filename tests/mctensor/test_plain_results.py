"""Results that torch's own code would write into plain tensors: padded and packed sequences; others are refused."""

import pytest
import torch
from torch import nn
from torch.nn.utils import rnn

import halfulp as hu
from halfulp import MCTensor
from halfulp.subclass import strict

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
LENGTHS = [3, 5, 1, 4]


def encoded(*shape, dtype=torch.float32, components=2):
    return MCTensor.encode(torch.randn(shape, dtype=torch.float64), components, dtype)


def same(found, wanted, near=0.0):
    assert isinstance(found, MCTensor)
    assert found.shape == wanted.shape
    near = max(near, 2.0**-26 if found.dtype == torch.float16 else 0.0)  # several scales become one
    return (found.decode() - wanted).abs().max().item() <= near


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("batch_first", [False, True])
def test_padded_sequences_keep_every_component(dtype, side, batch_first, seed):
    sequences = [encoded(n, 2, dtype=dtype).requires_grad_() for n in LENGTHS]
    options = {"batch_first": batch_first, "padding_value": 0.25, "padding_side": side}
    found = rnn.pad_sequence(sequences, **options)
    assert same(found.detach(), rnn.pad_sequence([x.detach().decode() for x in sequences], **options))
    (found * found).sum().backward()
    for x in sequences:
        assert torch.equal(x.grad, (2 * x.detach()).decode(dtype))


@pytest.mark.parametrize("components", [2, 3])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("enforce_sorted", [False, True])
def test_packed_sequences_come_back(dtype, components, enforce_sorted, seed):
    lengths = sorted(LENGTHS, reverse=True) if enforce_sorted else LENGTHS
    sequences = [encoded(n, 2, dtype=dtype, components=components) for n in lengths]
    plain = [x.decode() for x in sequences]
    with strict():
        packed = rnn.pack_sequence(sequences, enforce_sorted=enforce_sorted)
        assert same(packed.data, rnn.pack_sequence(plain, enforce_sorted=enforce_sorted).data)
        padded, sizes = rnn.pad_packed_sequence(packed, padding_value=0.5, total_length=7)
        wanted, theirs = rnn.pad_packed_sequence(
            rnn.pack_sequence(plain, enforce_sorted=enforce_sorted), padding_value=0.5, total_length=7
        )
        assert same(padded, wanted)
        assert torch.equal(sizes, theirs)
        for x, y in zip(rnn.unpack_sequence(packed), plain):
            assert same(x, y)


def test_a_packed_lstm_keeps_its_digits(seed):
    start = nn.LSTM(3, 4, batch_first=True, bidirectional=True).double()
    with torch.no_grad():
        for parameter in start.parameters():
            parameter.copy_(MCTensor.encode(parameter, 2, torch.float32).decode())
    sequences = [encoded(n, 3) for n in LENGTHS]

    def run(layer, given):
        given = [x.detach().requires_grad_() for x in given]
        out, _ = rnn.pad_packed_sequence(layer(rnn.pack_sequence(given, enforce_sorted=False))[0], batch_first=True)
        (out * out).sum().backward()
        return out.detach(), [x.grad for x in given]

    wanted, theirs = run(start, [x.decode() for x in sequences])
    found, ours = run(hu.multicomponent(start, 2, torch.float32, gradients="components"), sequences)
    assert same(found, wanted, 1e-12)
    for x, y in zip(ours, theirs):
        assert ((x.decode() if isinstance(x, MCTensor) else x) - y).abs().max() < 1e-6


def test_total_length_below_the_longest_is_refused():
    packed = rnn.pack_sequence([encoded(3, 2)])
    with pytest.raises(ValueError, match="total_length"):
        rnn.pad_packed_sequence(packed, total_length=2)


REFUSED = {
    "vander": lambda x: torch.vander(x),
    "linspace": lambda x: torch.linspace(x[0], 2.0, 3),
    "logspace": lambda x: torch.logspace(0.5, x[0], 3),
    "normal": lambda x: torch.normal(0.3, x.abs()),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_torch_writes_into_plain_tensors_is_refused(name, seed):
    with pytest.raises(NotImplementedError, match=rf"{name}.* writes one component into a plain tensor"):
        REFUSED[name](encoded(4))
