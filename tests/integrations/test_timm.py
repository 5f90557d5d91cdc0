"""Optimizers by name in timm's factory; skipped where timm, or torchvision, is missing."""

import pytest
import torch

import halfulp as hu

pytest.importorskip("torchvision")
timm = pytest.importorskip("timm")
from halfulp.integrations.timm import register  # noqa: E402


@pytest.mark.filterwarnings("ignore")
def test_every_optimizer_is_made_by_its_name():
    names = register()
    kinds = {name: kind for name, kind in hu.optim.OPTIMIZERS.items() if name != "Muon"}
    assert len(names) == len(kinds)
    for name, kind in zip(names, kinds.values(), strict=True):
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4)).bfloat16()
        made = timm.optim.create_optimizer_v2(model, name, lr=0.1, weight_decay=0.05, weight_update="stochastic")
        assert type(made) is kind
        assert made.param_groups[0]["weight_update"].name == "stochastic"


def test_options_are_words_on_timms_command_line():
    register()
    model = torch.nn.Linear(4, 4)
    made = timm.optim.create_optimizer_v2(model, "huadamw", lr=0.1, param_dtype="bf16", state_dtype="8bit")
    assert model.weight.dtype == torch.bfloat16
    assert made.defaults["state_dtype"] == "8bit"
