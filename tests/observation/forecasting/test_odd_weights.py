"""What a forecast cannot follow is named, and not left out in silence."""

import math

import pytest
import torch
from torch import nn

import halfulp as hu

W = torch.ones(8, 8, dtype=torch.bfloat16)


def test_complex_quantized_and_scale_tensors_are_named():
    others = {
        "wave": torch.ones(3, dtype=torch.complex64),
        "codes": torch.ones(3, 3, dtype=torch.int8),
        "scales": torch.ones(3).to(torch.float8_e8m0fnu),
        "pairs": torch.ones(3, 3, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
    }
    beside = {"positions": torch.arange(3), "mask": torch.ones(3, dtype=torch.bool), "empty": torch.empty(0)}
    ahead = hu.forecast({"w": W} | others | beside, 1e-3, steps=10)
    assert [layer.name for layer in ahead.layers] == ["w", "empty"]
    (said,) = ahead.notes
    assert all(repr(name) in said for name in others)
    assert not any(name in said for name in beside)
    with pytest.raises(ValueError, match="nothing to forecast"):
        hu.forecast(others, 1e-3, steps=10)


@pytest.mark.parametrize("place", ["weight", "state"])
def test_nan_is_said(place):
    weights = {"w": W.clone(), "v": W.clone()}
    state = {"exp_avg": W.clone(), "exp_avg_sq": W.clone(), "step": torch.tensor(3.0)}
    (weights["w"] if place == "weight" else state["exp_avg_sq"])[2, 2] = math.nan
    states = {"state": {0: state}, "param_groups": [{"params": [0, 1], "param_names": ["w", "v"]}]}
    ahead = hu.forecast(weights, 1e-3, steps=10, states=states)
    assert "'w' hold NaN or infinity, in weights or states: these elements are left out" in ahead.notes
    assert not any("'v'" in note for note in ahead.notes)


@pytest.mark.filterwarnings("ignore:Lazy modules")
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: nn.Linear(3, 3, device="meta"), "weight is on the meta device: give a model with weights"),
        (lambda: nn.LazyLinear(3), "weight is uninitialized: run the model once"),
        (lambda: {"w": torch.eye(4).to_sparse()}, r"w is a tensor of layout torch.sparse_coo: .*x\.to_dense"),
    ],
)
def test_weights_without_numbers_are_refused_by_name(make, said):
    with pytest.raises(NotImplementedError, match=said):
        hu.forecast(make(), 1e-3, steps=10)


def test_more_steps_than_any_training_makes_are_refused():
    with pytest.raises(ValueError, match="give at most 100,000,000 steps ahead"):
        hu.forecast({"w": W}, 1e-3, "cosine", steps=10**9)
