"""The conformance vectors of tests/vectors, which other implementations can be run against."""

import json
from pathlib import Path

import pytest
import torch

from halfulp.kernels import engine, same_bits
from halfulp.rounding import Stochastic, get_rounding, mix64, quantize, random_words
from halfulp.rounding._random_bits import STREAM_VERSION

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "rounding.json").read_text())


def floats(words: list[str]) -> torch.Tensor:
    return torch.tensor([int(word, 16) - ((int(word, 16) >> 63) << 64) for word in words]).view(torch.float64)


@pytest.mark.parametrize("name", ["llvm", "reference"])
def test_rounding(name):
    assert VECTORS["version"] == STREAM_VERSION
    with engine(name):
        for group in VECTORS["rounding"]:
            x = floats(group["inputs"])
            for case in group["cases"]:
                stochastic = case["rounding"] == "stochastic"
                rounding = Stochastic(case["seed"]) if stochastic else get_rounding(case["rounding"])
                counter = case.get("counter", 0)
                q = quantize(x, group["format"], rounding, overflow=case["overflow"], counter=counter)
                assert same_bits(q, floats(case["outputs"])), (group["format"], case["rounding"])


def test_streams():
    for row in VECTORS["streams"]:
        key = mix64(int(row["seed"]), int(row["counter"]))
        assert f"{key:016x}" == row["key"]
        start = int(row["first_index"])
        words = random_words(key, torch.arange(start, start + len(row["words"])))
        assert [f"{word:08x}" for word in words.tolist()] == row["words"]
