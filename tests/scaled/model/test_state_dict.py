"""Scaled parameters in a state_dict: plain tensors, and back."""

import copy
import io

import pytest
import torch
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import nn

import halfulp as hu
from halfulp.kernels import same_bits
from halfulp.mctensor import plain_state_dict as plain_components
from halfulp.scaled import plain_state_dict, unscalify

DTYPES = [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float32]


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Sequential(nn.Linear(3, 2, bias=False)))


def same(a: nn.Module, b: nn.Module) -> bool:
    pairs = list(zip(a.parameters(), b.parameters(), strict=True))
    return all(same_bits(x.payload, y.payload) and same_bits(x.scale, y.scale) for x, y in pairs)


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


def test_values_under_the_name_scales_beside_and_keep_vars_gives_the_parameter(seed):
    layer = hu.scalify(nn.Linear(2, 2))
    names = ["a.weight", "a.weight.payload_scale", "a.bias", "a.bias.payload_scale"]
    assert list(layer.state_dict(prefix="a.")) == names
    assert torch.equal(layer.state_dict()["weight"], layer.weight.decode())
    assert layer.state_dict()["weight.payload_scale"].data_ptr() == layer.weight.scale.data_ptr()
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
        model.load_state_dict(other.state_dict() | {"0.weight": torch.zeros(9, 9)})


def test_damaged_files_change_nothing(seed):
    model = hu.scalify(net())
    start = copy.deepcopy(model)
    state = hu.scalify(net()).state_dict()
    for damaged, message in (
        (state | {"2.0.weight.payload_scale": torch.tensor(3.0)}, "no power|damaged"),
        (state | {"2.0.weight.component_1": torch.zeros(1)}, "another layout"),
        (state | {"2.0.weight": torch.zeros(2, 3, dtype=torch.int64)}, "int64"),
        ({name: x for name, x in state.items() if name != "2.0.weight"}, r"has '2.0.weight.payload_scale' alone"),
    ):
        for strict in (True, False):
            with pytest.raises(ValueError, match=message):
                model.load_state_dict(damaged, strict=strict)
        assert same(model, start)
    for metadata in state._metadata.values():
        if "halfulp_scaled" in metadata:
            metadata["halfulp_scaled"] = 3
    with pytest.raises(ValueError, match="layout 3"):
        model.load_state_dict(state)
    with pytest.raises(ValueError, match="layout 3"):
        plain_state_dict(state)


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_parameters_of_both_kinds_in_one_model(kind, seed):
    def both() -> nn.Module:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        hu.multicomponent(model[0], dtype=kind)
        hu.scalify(model[1])
        return model

    model, other = both(), both()
    other.load_state_dict(by_safetensors(model.state_dict()))
    assert torch.equal(model[0].weight.decode(), other[0].weight.decode())
    assert torch.equal(model[1].weight.decode(), other[1].weight.decode())
    plain, state = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), model.state_dict()
    for first, second in (
        (plain_state_dict, hu.mctensor.plain_state_dict),
        (hu.mctensor.plain_state_dict, plain_state_dict),
    ):
        plain.load_state_dict(second(first(state)))
        for i in (0, 1):
            assert torch.equal(plain[i].weight, model[i].weight.decode(torch.float32))


@pytest.mark.parametrize("through", [dict, by_torch, by_safetensors])
def test_any_plain_loader_takes_the_values(through, seed):
    model, plain = hu.scalify(net()), net()
    found = plain.load_state_dict(through(model.state_dict()), strict=False)
    assert not found.missing_keys
    assert set(found.unexpected_keys) == {f"{name}.payload_scale" for name, _ in plain.named_parameters()}
    for mine, other in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, other.decode())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("power", [-126, -60, 0, 60, 110, 127])
def test_values_and_scales_are_exact_at_both_ends_of_the_range(dtype, power, seed):
    """Subnormal, zero, negative zero, largest, infinite and NaN payloads under every scale."""
    top = torch.finfo(dtype).max
    special = [0.0, -0.0, 1.0, -1.5, top, -top, torch.finfo(dtype).smallest_normal, torch.finfo(dtype).tiny / 2]
    special += [] if dtype == torch.float8_e4m3fn else [torch.inf, -torch.inf]
    payload = torch.tensor([*special, torch.nan]).to(dtype)
    model, other = (hu.scalify(nn.LayerNorm(len(payload), bias=False), dtype) for _ in range(2))
    with torch.no_grad():
        model.weight._payload.copy_(payload)
        model.weight._scale.fill_(2.0**power)
    state = by_safetensors(model.state_dict())
    wanted = payload.double() * 2.0**power
    finite = wanted.isfinite() & (wanted.abs() < 2.0**128)
    assert torch.equal(state["weight"].double()[finite], wanted[finite])
    other.load_state_dict(state)
    assert torch.equal(other.weight.scale, model.weight.scale)
    ours, theirs = model.weight.payload.float(), other.weight.payload.float()
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert same_bits(ours[~ours.isnan()], theirs[~ours.isnan()])


def test_values_that_somebody_changed_are_encoded_anew(seed):
    model = hu.scalify(net())
    state = model.state_dict()
    state["0.weight"] = state["0.weight"] * 1.2345e6
    model.load_state_dict(state)
    torch.testing.assert_close(model[0].weight.decode(), state["0.weight"], rtol=2**-10, atol=0)


class Named(nn.Module):
    """Parameters that are called as the parts of a scaled one are."""

    def __init__(self) -> None:
        super().__init__()
        self.payload = nn.Parameter(torch.randn(3))
        self.scale = nn.Parameter(torch.randn(()))


def test_parameters_may_be_called_payload_and_scale(seed):
    model, plain = hu.scalify(nn.Sequential(Named())), nn.Sequential(Named())
    state = by_safetensors(model.state_dict())
    assert set(state) == {f"0.{name}{part}" for name in ("payload", "scale") for part in ("", ".payload_scale")}
    plain.load_state_dict(plain_state_dict(state))
    assert torch.equal(plain[0].payload, model[0].payload.decode())
    other = hu.scalify(nn.Sequential(Named()))
    other.load_state_dict(state)
    assert same(model, other)


def test_the_plain_state_keeps_names_order_and_what_is_no_tensor(seed):
    model = hu.scalify(net())
    state = {**model.state_dict(), "note": "text", "0.scale": torch.tensor(3.0)}
    plain = plain_state_dict(state)
    assert list(plain) == [*net().state_dict(), "note", "0.scale"]
    assert plain["note"] == "text"
    assert plain["0.scale"] is state["0.scale"]
    whole = plain_state_dict(model.state_dict(keep_vars=True))
    assert all(torch.equal(whole[name], plain[name]) for name in whole)


def test_tied_parameters_save_and_load(seed):
    def tied() -> nn.Module:
        model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5, bias=False))
        model[1].weight = model[0].weight
        return hu.scalify(model)

    model, other, plain = tied(), tied(), nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5, bias=False))
    state = by_torch(model.state_dict())
    assert state["0.weight"].data_ptr() == state["1.weight"].data_ptr()
    assert list(state) == [f"{i}.weight{part}" for i in (0, 1) for part in ("", ".payload_scale")]
    other.load_state_dict(state)
    assert same(model, other)
    assert other[0].weight is other[1].weight
    plain.load_state_dict(by_safetensors(plain_state_dict(model.state_dict())))
    assert torch.equal(plain[0].weight, model[1].weight.decode())


@pytest.mark.parametrize("convert", [hu.scalify, lambda m: hu.multicomponent(m, 2, torch.float16)])
def test_what_a_state_dict_holds_can_be_swapped(convert, seed):
    """torch.utils.swap_tensors, by which modules convert tensor subclasses, takes no tensor that is weakly held."""
    model = convert(nn.Linear(4, 4))
    for value in (*model.state_dict().values(), *model.parameters()):
        before = value.detach().clone()
        other = value.detach() * 0.5
        other = nn.Parameter(other) if isinstance(value, nn.Parameter) else other
        torch.utils.swap_tensors(value, other)
        assert not torch.equal(value, before)
        assert torch.equal(other, before)


def test_tied_values_are_those_of_their_own_state_dict(seed):
    model = hu.scalify(nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)))
    model[1].weight = model[0].weight
    for factor in (2.0, 3.0):
        with torch.no_grad():
            model[0].weight.mul_(factor)
        state = model.state_dict()
        assert state["0.weight"].data_ptr() == state["1.weight"].data_ptr()
        assert torch.equal(state["1.weight"], model[1].weight.decode())
        state["0.weight"].mul_(2.0)  # what somebody changes is not taken for the parameter's
        model.state_dict(destination=state)
        assert torch.equal(state["0.weight"], model[0].weight.decode())


def test_optimizers_read_the_weights_of_a_scaled_model(seed):
    model = hu.scalify(net())
    optimizer = hu.optim.AdamW(model.parameters(), lr=1e-2)
    model(torch.randn(4, 4)).square().sum().backward()
    optimizer.step()
    weights = optimizer.float32_state_dict(model)
    state = model.state_dict()
    plain = plain_state_dict(state)
    assert not weights.keys() & {name for name in state if name.endswith(".payload_scale")}
    assert list(weights) == list(plain) == list(net().state_dict())
    assert all(torch.equal(weights[name], plain[name].float()) for name in weights)
    with torch.no_grad():
        model[0].weight.mul_(3.0)
    optimizer.load_float32_state_dict(model, weights)
    assert torch.equal(model[0].weight.decode(), weights["0.weight"])


@pytest.mark.parametrize("convert", [hu.scalify, lambda m: hu.multicomponent(m, 2, torch.float16)])
@pytest.mark.parametrize("size", ["1GB", "2KB"])
def test_save_pretrained_writes_weights_that_from_pretrained_takes(convert, size, tmp_path, seed):
    """Whole and sharded: no weight is missing, each has the value of the parameter, and it comes back exactly."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=11, n_positions=8)
    model = convert(transformers.GPT2LMHeadModel(config).eval())
    with torch.no_grad():
        # Scales of their own, that no measurement would choose.
        for parameter in model.parameters():
            if isinstance(parameter, hu.ScaledTensor):
                parameter._payload.mul_(0.25)
    model.save_pretrained(tmp_path, max_shard_size=size)
    again, report = transformers.GPT2LMHeadModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["mismatched_keys"]
    for name, parameter in model.named_parameters():
        value = parameter.detach().decode(torch.float64)
        torch.testing.assert_close(again.get_parameter(name).double(), value, rtol=2**-11, atol=2**-20)
    files = [load_safetensors(path.read_bytes()) for path in tmp_path.glob("*.safetensors")]
    other = convert(transformers.GPT2LMHeadModel(config).eval())
    other.load_state_dict({name: value for file in files for name, value in file.items()}, strict=False)
    for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine.detach().decode(torch.float64), theirs.detach().decode(torch.float64))
        assert torch.equal(mine.scale, theirs.scale)


@pytest.mark.parametrize("convert", [hu.scalify, lambda m: hu.multicomponent(m, 3, torch.float16)])
def test_distributed_checkpoints_of_torch_find_every_entry(convert, seed):
    """torch.distributed.checkpoint.state_dict looks names up as attributes, of parameters too."""
    from torch.distributed.checkpoint import state_dict as distributed

    model, other = convert(net()), convert(net())
    distributed.set_model_state_dict(other, distributed.get_model_state_dict(model))
    for name, entry in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], entry)


@pytest.mark.parametrize("convert", [hu.scalify, lambda m: hu.multicomponent(m, 3, torch.float16)])
def test_a_parameter_is_tied_to_no_other_by_an_identity_that_is_used_again(convert, seed):
    first, second = convert(torch.nn.Linear(3, 3)), convert(torch.nn.Linear(3, 3))
    state = first.state_dict(prefix="0.")
    stale = "0.weight", id(state), id(state["0.weight"]), state["0.weight"]._version, second.weight._version
    second.weight.__dict__["_halfulp_saved"] = stale
    second.state_dict(destination=state, prefix="1.")
    assert torch.equal(state["1.weight"], second.state_dict()["weight"])


@pytest.mark.parametrize("function", [plain_state_dict, plain_components])
def test_a_model_for_its_state_dict_is_refused(function):
    with pytest.raises(TypeError, match=r"takes a state_dict, got a Linear: give it model.state_dict\(\)"):
        function(torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match="a mapping from names to tensors"):
        function([1])
