"""Scaled parameters in a state_dict: plain tensors, and back."""

import copy
import io

import pytest
import torch
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import nn

import halfulp as hu
from halfulp.scaled import plain_state_dict, unscalify

DTYPES = [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float32]


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Sequential(nn.Linear(3, 2, bias=False)))


def same(a: nn.Module, b: nn.Module) -> bool:
    pairs = list(zip(a.parameters(), b.parameters(), strict=True))
    return all(torch.equal(x.payload.float(), y.payload.float()) and torch.equal(x.scale, y.scale) for x, y in pairs)


def by_torch(state: dict) -> dict:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def by_safetensors(state: dict) -> dict:
    return load_safetensors(save_safetensors(state))


@pytest.mark.parametrize("through", [dict, copy.deepcopy, by_torch, by_safetensors])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_payloads_and_scales_come_back(dtype, through, seed):
    model, other = hu.scalify(net(), dtype), hu.scalify(net(), dtype)
    state = model.state_dict()
    assert all(type(value) is torch.Tensor for value in state.values())
    assert not same(model, other)
    assert str(other.load_state_dict(through(state))) == "<All keys matched successfully>"
    assert same(model, other)


def test_entries_share_memory_and_keep_vars_gives_the_parameter(seed):
    layer = hu.scalify(nn.Linear(2, 2))
    assert set(layer.state_dict(prefix="a.")) == {"a.weight", "a.weight.scale", "a.bias", "a.bias.scale"}
    assert layer.state_dict()["weight"].data_ptr() == layer.weight.payload.data_ptr()
    assert layer.state_dict(keep_vars=True)["weight"] is layer.weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("size", [1e-20, 1.0, 1e20])
def test_a_plain_file_is_encoded(dtype, size, seed):
    plain = net().to(dtype)
    with torch.no_grad():
        plain[0].weight.mul_(size)
    model = hu.scalify(net())
    model.load_state_dict(plain.state_dict())
    torch.testing.assert_close(model[0].weight.decode(), plain[0].weight.float(), rtol=2**-10, atol=size * 2**-10)
    assert model[0].weight.payload.dtype == torch.float16


def test_another_storage_is_encoded_again(seed):
    wide, narrow = hu.scalify(net(), torch.float32), hu.scalify(net(), torch.float8_e4m3fn)
    narrow.load_state_dict(wide.state_dict())
    assert narrow[0].weight.payload.dtype == torch.float8_e4m3fn
    torch.testing.assert_close(narrow[0].weight.decode(), wide[0].weight.decode(), rtol=2**-4, atol=2**-9)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_plain_model_takes_the_values(dtype, seed):
    model, plain = hu.scalify(net(), dtype), net()
    plain.load_state_dict(plain_state_dict(by_torch(model.state_dict())))
    for ours, theirs in zip(unscalify(copy.deepcopy(model)).parameters(), plain.parameters()):
        assert torch.equal(ours, theirs)


def test_assigning_and_missing_entries(seed):
    model, other = hu.scalify(net()), hu.scalify(net())
    model.load_state_dict(other.state_dict(), assign=True)
    assert same(model, other)
    lacking = {name: value for name, value in other.state_dict().items() if not name.startswith("0.bias")}
    with pytest.raises(RuntimeError, match=r'Missing key.*"0\.bias"'):
        model.load_state_dict(lacking)
    assert model.load_state_dict(lacking, strict=False).missing_keys == ["0.bias"]
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict(other.state_dict() | {"0.weight": torch.zeros(9, 9, dtype=torch.float16)})


def test_damaged_files_change_nothing(seed):
    model = hu.scalify(net())
    start = copy.deepcopy(model)
    state = hu.scalify(net()).state_dict()
    scaleless = {name: value for name, value in state.items() if name != "2.0.weight"}
    for damaged, message in (
        (state | {"2.0.weight.scale": torch.tensor(3.0)}, "no power|damaged"),
        (state | {"2.0.weight.component_1": torch.zeros(1)}, "another layout"),
        (state | {"2.0.weight": torch.zeros(2, 3, dtype=torch.int64)}, "int64"),
        (scaleless, "damaged"),
    ):
        with pytest.raises(ValueError, match=message):
            model.load_state_dict(damaged)
        assert same(model, start)
    for metadata in state._metadata.values():
        if "halfulp_scaled" in metadata:
            metadata["halfulp_scaled"] = 2
    with pytest.raises(ValueError, match="layout 2"):
        model.load_state_dict(state)
    with pytest.raises(ValueError, match="layout 2"):
        plain_state_dict(state)


def test_parameters_of_both_kinds_in_one_model(seed):
    def both() -> nn.Module:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        hu.multicomponent(model[0], dtype=torch.bfloat16)
        hu.scalify(model[1])
        return model

    model, other = both(), both()
    other.load_state_dict(by_safetensors(model.state_dict()))
    assert torch.equal(model[0].weight.decode(), other[0].weight.decode())
    assert torch.equal(model[1].weight.decode(), other[1].weight.decode())
