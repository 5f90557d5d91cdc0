"""Multi-component parameters in a state_dict: plain tensors beside each other, and back."""

import copy
import io

import pytest
import torch
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import nn

from halfulp.kernels import same_bits
from halfulp.mctensor import MCTensor
from halfulp.mctensor._convert_model import (
    _make_state_dict_entries,
    multicomponent,
    plain_state_dict,
    single_component,
)

KINDS = [(torch.float16, 2), (torch.float16, 3), (torch.bfloat16, 2), (torch.float32, 4), (torch.float64, 2)]


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Sequential(nn.Linear(3, 2, bias=False)))


def fresh(kind: tuple[torch.dtype, int]) -> nn.Module:
    """A model whose lower components are all in use, and which has run a batch."""
    model = multicomponent(net().double(), kind[1], kind[0])
    model(torch.randn(6, 4, dtype=kind[0]))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 / 3)
    return model


def same(a: nn.Module, b: nn.Module) -> bool:
    pairs = list(zip(a.parameters(), b.parameters(), strict=True))
    parts = all(all(map(same_bits, x.components, y.components)) for x, y in pairs)
    return parts and all(x.scale is y.scale or same_bits(x.scale, y.scale) for x, y in pairs)


def by_torch(state: dict) -> dict:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def by_safetensors(state: dict) -> dict:
    return load_safetensors(save_safetensors(state))


@pytest.mark.parametrize("through", [dict, copy.deepcopy, by_torch, by_safetensors])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_component_and_scale_comes_back(kind, through, seed):
    model, other = fresh(kind), fresh(kind)
    state = model.state_dict()
    assert all(type(value) is torch.Tensor for value in state.values())
    assert not same(model, other)
    assert str(other.load_state_dict(through(state))) == "<All keys matched successfully>"
    assert same(model, other)
    assert all(torch.equal(x, y) for x, y in zip(model.buffers(), other.buffers()))


def test_the_names(seed):
    names = set(multicomponent(nn.Linear(2, 2), 3, torch.float16).state_dict(prefix="a."))
    assert names == {
        *("a.weight", "a.weight.component_1", "a.weight.component_2", "a.weight.component_scale"),
        *("a.bias", "a.bias.component_1", "a.bias.component_2", "a.bias.component_scale"),
    }


def test_entries_share_memory_and_keep_vars_gives_the_parameter(seed):
    layer = multicomponent(nn.Linear(2, 2), 2)
    assert layer.state_dict()["weight.component_1"].data_ptr() == layer.weight.components[1].data_ptr()
    assert layer.state_dict(keep_vars=True)["weight"] is layer.weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_plain_file_is_split(dtype, seed):
    plain = net().to(dtype)
    model = multicomponent(net(), 3 if dtype == torch.float64 else 2, torch.float32)
    model.load_state_dict(plain.state_dict())
    assert torch.equal(model[0].weight.decode(), plain[0].weight.double())
    half = multicomponent(net(), 2, torch.float16)
    half.load_state_dict(plain.state_dict())
    torch.testing.assert_close(half[0].weight.decode(), plain[0].weight.double(), rtol=2**-20, atol=2**-24)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_plain_model_takes_the_sums(kind, seed):
    model, plain = fresh(kind), net().double()
    plain.load_state_dict(plain_state_dict(by_torch(model.state_dict()), torch.float64))
    for ours, theirs in zip(model.parameters(), plain.parameters()):
        assert torch.equal(ours.decode(), theirs)
    single = single_component(copy.deepcopy(model))
    single.load_state_dict(plain_state_dict(model.state_dict(), torch.float64))


def test_fewer_components_in_the_file_are_promoted_more_are_refused(seed):
    two, three = fresh((torch.bfloat16, 2)), fresh((torch.bfloat16, 3))
    state = three.state_dict()
    before = copy.deepcopy(two)
    with pytest.raises(ValueError, match=r"'0\.weight' has 3 components .* components=3, dtype=torch\.bfloat16"):
        two.load_state_dict(state)
    assert same(two, before)
    three.load_state_dict(two.state_dict())
    assert torch.equal(three[0].weight.decode(), two[0].weight.decode())
    wide = multicomponent(net(), 2, torch.float32)
    wide.load_state_dict(state)
    assert torch.equal(wide[0].weight.decode(), MCTensor.from_components(state_parts(state)).decode())


def state_parts(state: dict) -> list[torch.Tensor]:
    return [state["0.weight"], state["0.weight.component_1"], state["0.weight.component_2"]]


def test_assign_takes_the_files_tensors(seed):
    model, state = multicomponent(net(), 2), multicomponent(net(), 2).state_dict()
    model.load_state_dict(state, assign=True)
    assert isinstance(model[0].weight, nn.Parameter)
    assert model[0].weight.components[1].data_ptr() == state["0.weight.component_1"].data_ptr()


def test_strict_reports_what_is_missing_unexpected_or_of_another_size(seed):
    model = multicomponent(net(), 2)
    state = model.state_dict()
    lacking = {name: value for name, value in state.items() if not name.startswith("0.bias")}
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "0\.bias"'):
        model.load_state_dict(lacking)
    assert model.load_state_dict(lacking, strict=False).missing_keys == ["0.bias"]
    with pytest.raises(RuntimeError, match=r"size mismatch for 0\.weight"):
        model.load_state_dict(state | {name: torch.zeros(9, 9) for name in ("0.weight", "0.weight.component_1")})
    with pytest.raises(RuntimeError, match="Unexpected"):
        model.load_state_dict(state | {"3.weight": torch.zeros(1)})


@pytest.mark.parametrize("safe", [False, True])
def test_another_layout_is_refused_and_nothing_is_loaded(safe, seed):
    model, state = fresh((torch.bfloat16, 2)), fresh((torch.bfloat16, 2)).state_dict()
    before = copy.deepcopy(model)
    if safe:
        state["2.0.weight.exponents"] = torch.zeros(2)
    else:
        state._metadata["2.0"]["halfulp_components"] = 7
    with pytest.raises(ValueError, match="another layout" if safe else "layout 7, and .* reads layout 2"):
        model.load_state_dict(state)
    assert same(model, before)
    if not safe:
        with pytest.raises(ValueError, match="layout 7"):
            plain_state_dict(state)


def test_damaged_files_are_refused(seed):
    model = multicomponent(net(), 3)
    state = dict(model.state_dict())
    for lost, message in (("0.weight", "not '0.weight' itself"), ("0.weight.component_1", "not all there")):
        damaged = {name: value for name, value in state.items() if name != lost}
        with pytest.raises(ValueError, match=message):
            model.load_state_dict(damaged)
        with pytest.raises(ValueError, match=message):
            plain_state_dict(damaged)
    with pytest.raises(ValueError, match="several shapes"):
        model.load_state_dict(state | {"0.weight.component_1": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"torch\.int64 in the file"):
        model.load_state_dict({"0.weight": torch.zeros(3, 4, dtype=torch.int64)})


def test_a_copy_has_hooks_of_its_own(seed):
    model = multicomponent(net(), 2)
    twin = copy.deepcopy(model)
    single_component(model)
    assert "0.weight.component_1" in twin.state_dict()
    assert "0.weight.component_1" not in model.state_dict()


def test_components_stand_behind_their_parameter_in_any_module(seed):
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(2))
            self.inner = nn.Linear(2, 2, bias=False)
            self.bare = nn.Linear(2, 2, bias=False)

    model = multicomponent(Outer(), 2, where=["gain", "inner.*"])
    assert list(model.state_dict()) == [
        *("gain", "gain.component_1", "inner.weight", "inner.weight.component_1", "bare.weight")
    ]


def test_assigned_components_get_memory_of_their_own(seed):
    block = torch.randn(3, 4).half()
    block[1] = block[0] * 2**-12
    other = block[2].clone()
    entries = {"weight": block[0].view(2, 2), "weight.component_1": block[1].view(2, 2)}
    model = multicomponent(torch.nn.Linear(2, 2, bias=False), components=2, dtype=torch.float16)
    model.load_state_dict({**entries, "weight.component_scale": torch.tensor(1.0)}, assign=True)
    before = model.weight.detach().decode().clone()
    with torch.no_grad():
        model.weight[0].mul_(2.0**20)
    after = model.weight.detach().decode()
    lost = float(model.weight.scale) * 2**-24  # for each of both components half of the least number
    assert torch.allclose(after[1], before[1], rtol=2**-18, atol=lost)
    assert torch.allclose(after[0], before[0] * 2**20, rtol=2**-18, atol=lost)
    assert torch.equal(block[2], other)


@pytest.mark.parametrize(
    ("dtype", "number", "scale", "held"),
    [
        (torch.bfloat16, 1.0, 2.0**-126, torch.float32),
        (torch.bfloat16, 2.0**-126 * (1 + 2.0**-7) * 2.0**-19, 2.0**-126, torch.float64),  # below float32's last bit
        (torch.float64, 1.0, 2.0, torch.float64),
    ],
)
def test_a_leading_component_times_its_scale_is_exact(dtype, number, scale, held):
    value = MCTensor.encode(torch.tensor([number], dtype=torch.float64), 2, dtype, scale=scale)
    found = _make_state_dict_entries("w", value)["w"]
    assert found.dtype is held
    assert found.double().item() == number


@pytest.mark.parametrize("kind", [(torch.float16, 1), (torch.float16, 2), (torch.float16, 3)], ids=str)
def test_what_stands_under_the_name_is_a_good_value(kind, seed):
    """The leading component with its scale, in a dtype that holds it; the whole comes back under the same scale."""
    model, plain = fresh(kind), net().double()
    with torch.no_grad():
        model[0].weight.mul_(2.0**40)
    state = by_safetensors(model.state_dict())
    found = plain.load_state_dict(state, strict=False)
    assert not found.missing_keys
    wanted = model[0].weight.detach().decode()
    torch.testing.assert_close(plain[0].weight.detach(), wanted, rtol=2**-11, atol=float(wanted.abs().max()) * 2**-24)
    other = fresh(kind)
    other.load_state_dict(state)
    assert same(model, other)
    with pytest.raises(ValueError, match="written without the entries beside it"):
        other.load_state_dict(state | {"0.weight": torch.full((3, 4), 1 + 2**-20)})
