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


@pytest.mark.filterwarnings("ignore")
def test_timm_cuts_a_name_at_its_last_underscore_and_takes_no_class():
    """Why the names are as they are."""
    register()
    made = timm.optim.create_optimizer_v2(torch.nn.Linear(4, 4), "halfulp_adamw", lr=0.1)
    assert type(made) is torch.optim.AdamW
    with pytest.raises(AttributeError, match="lower"):
        timm.optim.create_optimizer_v2(torch.nn.Linear(4, 4), hu.AdamW, lr=0.1)


@pytest.mark.filterwarnings("ignore")
def test_the_scaler_stands_in_timms(seed):
    from timm.utils import NativeScaler

    torch.manual_seed(seed)
    model, plain = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)
    plain.load_state_dict(model.state_dict())
    scaler, x = NativeScaler(device="cpu"), torch.randn(8, 4)
    scaler._scaler = hu.AdaptiveGradScaler(model)
    for one in (model, plain):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        loss = one(x).square().mean()
        if one is model:
            scaler(loss, optimizer, clip_grad=0.5, parameters=one.parameters())
        else:
            loss.backward()
            torch.nn.utils.clip_grad_norm_(one.parameters(), 0.5)
            optimizer.step()
    assert all(map(torch.equal, model.parameters(), plain.parameters()))
    held = scaler.state_dict()
    scaler.load_state_dict(held)
