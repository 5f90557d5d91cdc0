"""Checksums of rows against Python's integers: one word is always seen, and several that cancel in a sum of bits."""

import struct

import pytest
import torch

from halfulp.kernels import checksum, compute_row_checksums

STEP, MIX = 0x9E3779B97F4A7C15, 0xB4B82F3A1D5C5A59
INTEGERS = {torch.float8_e4m3fn: "B", torch.bfloat16: "h", torch.float16: "h", torch.float32: "i", torch.float64: "i"}


def oracle(row):
    """The equation in Python's integers, of the bytes of a row."""
    kind = INTEGERS[row.dtype]
    data = bytes(row.contiguous().view(torch.uint8).tolist())
    words = struct.unpack(f"<{len(data) // struct.calcsize(kind)}{kind}", data)
    weights = (((((j * STEP) % 2**64) ^ MIX) * MIX) | 1 for j in range(1, len(words) + 1))
    found = sum(w * b for w, b in zip(weights, words)) % 2**64
    return found - 2**64 if found >= 2**63 else found


@pytest.mark.parametrize("dtype", INTEGERS)
def test_rows_are_what_the_equation_says(dtype, seed):
    for shape in ((4, 9), (3, 2, 5), (6,), (1, 1)):
        x = torch.randn(shape).to(dtype)
        assert compute_row_checksums(x).tolist() == [oracle(row) for row in x.reshape(len(x), -1)]
    assert compute_row_checksums(x[0, 0]).tolist() == compute_row_checksums(x).tolist()
    assert compute_row_checksums(torch.empty(0, 3, dtype=dtype)).shape == (0,)


@pytest.mark.parametrize(
    ("dtype", "written"),
    [
        (torch.float8_e4m3fn, [4817282250685798040, -111463372340626548]),
        (torch.float16, [-2807039850577376256, -6497181091834968576]),
        (torch.float32, [4794503009864253440, -9075752636086484992]),
    ],
)
def test_numbers_of_files_that_were_written_before(dtype, written):
    assert compute_row_checksums(torch.tensor([[1.0, 2.0], [3.0, 4.0]]).to(dtype)).tolist() == written


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_changes_that_cancel_in_a_sum_of_bits_are_seen(dtype, seed):
    x = torch.randn(8, 16, dtype=dtype)
    before = checksum(x)
    assert checksum(x.T.contiguous().T) == before
    for _ in range(50):
        changed = x.clone()
        words = changed.view(-1).view(torch.int32)
        one, other = torch.randperm(words.numel())[:2]
        bit = 1 << int(torch.randint(31, ()))
        words[one] += bit
        words[other] -= bit
        assert checksum(changed) != before
        swapped = x.clone()
        swapped[[0, 3]] = swapped[[3, 0]]
        assert checksum(swapped) != before
    signs = x.clone()
    signs[0, :2] *= -1
    assert checksum(signs) != before
