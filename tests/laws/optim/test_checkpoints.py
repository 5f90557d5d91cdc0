"""Law: whatever is saved and loaded, under every weight update and state codec, goes on with the same bits."""

import pytest
import torch
from safetensors.torch import load as from_safetensors
from safetensors.torch import save as to_safetensors

import halfulp as hu
from halfulp.kernels import engine, same_bits

from ...optim.checkpoint.steps import make_model, make_optimizer, take_steps, through_disk
from .cases import UPDATES, decoded, differing, narrow_updates, snapshot

CASES = [(u, "default") for u in narrow_updates()] + [
    (u, c) for u in ("split8", "kahan") for c in ("8bit", "fp32", "bf16x2")
]


@pytest.mark.parametrize(("update", "codec"), CASES)
def test_interrupted_saved_loaded_and_resumed_is_uninterrupted(seed, update, codec):
    model = make_model()
    optimizer = make_optimizer(update, codec, model)
    take_steps(model, optimizer, 0, 4)
    whole = snapshot(optimizer)

    model = make_model()
    optimizer = make_optimizer(update, codec, model)
    take_steps(model, optimizer, 0, 2)
    saved = through_disk({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    torch.manual_seed(seed)
    torch.rand(13)
    other = make_model(1)
    resumed = make_optimizer(update, codec, other)
    take_steps(other, resumed, 0, 1)
    other.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    take_steps(other, resumed, 2, 4)
    assert differing(whole, snapshot(resumed)) == []
    assert [s["step"] for s in resumed.state.values()] == [4] * 6


@pytest.mark.parametrize(("update", "codec"), CASES)
def test_every_state_keeps_its_dtype_and_bits(update, codec):
    model = make_model()
    optimizer = make_optimizer(update, codec, model)
    take_steps(model, optimizer, 0, 2)
    saved = through_disk(optimizer.state_dict())
    for number, parameter in enumerate(model.parameters()):
        for name, value in optimizer.state[parameter].items():
            kept = saved["state"][number][name]
            assert same_bits(kept, value) if isinstance(value, torch.Tensor) else kept == value, name
    twin = make_optimizer(update, codec, model)
    twin.load_state_dict(saved)
    assert differing(snapshot(optimizer), snapshot(twin)) == []


@pytest.mark.parametrize("update", narrow_updates())
def test_float32_weights_go_out_and_come_back(seed, update):
    model = make_model()
    model.register_buffer("running", torch.randn(5).bfloat16())
    model.register_buffer("count", torch.tensor(7))
    optimizer = make_optimizer(update, "default", model)
    take_steps(model, optimizer, 0, 4)
    out = optimizer.float32_state_dict(model)
    assert list(out) == list(model.state_dict())
    assert {value.dtype for value in out.values()} == {torch.float32, torch.int64}
    for name, parameter in model.named_parameters():
        assert torch.equal(out[name], decoded(optimizer, parameter))
    assert torch.equal(out["running"], model.running.float())

    other = make_model(1)
    other.register_buffer("running", torch.zeros(5).bfloat16())
    other.register_buffer("count", torch.tensor(0))
    target = make_optimizer(update, "default", other)
    target.load_float32_state_dict(other, from_safetensors(to_safetensors(out)))
    assert torch.equal(other.count, torch.tensor(7))
    again = target.float32_state_dict(other)
    for name, value in out.items():
        if update in ("nearest", "stochastic", "feedback"):
            assert torch.equal(again[name], value.bfloat16().float() if value.is_floating_point() else value)
        elif update not in ("kahan-literal",):
            torch.testing.assert_close(again[name], value, rtol=2.0**-15, atol=2.0**-30)
    if update in ("split", "master"):
        assert all(torch.equal(again[name], out[name]) for name in out)
    out["0.weight"].zero_()
    assert not (model[0].weight == 0).all(), "what went out is a copy"


@pytest.mark.parametrize("update", [*narrow_updates(), None])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_param_dtype_narrows_in_place_and_keeps_the_low_bits(seed, update, dtype):
    model = make_model(seed, torch.float32)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    parameters = list(model.parameters())
    if dtype == torch.float16 and update in ("split", "split-stochastic"):
        with pytest.raises(ValueError, match="kahan"):
            hu.optim.AdamW(model.parameters(), weight_update="split", param_dtype=dtype)
        assert all(torch.equal(start[name], value) for name, value in model.state_dict().items())
        return
    given = UPDATES[update] if update else None
    optimizer = hu.optim.AdamW(model.named_parameters(), weight_update=given, param_dtype=dtype)
    assert all(a is b for a, b in zip(parameters, model.parameters()))
    assert {p.dtype for p in model.parameters()} == {dtype}
    out = optimizer.float32_state_dict(model)
    for name, value in start.items():
        if update in ("nearest", "stochastic", "feedback"):
            assert torch.equal(out[name], value.to(dtype).float())
        elif update in ("split", "master", "components-3", "components-4"):
            torch.testing.assert_close(out[name], value, rtol=2.0**-23, atol=2.0**-25 if dtype == torch.float16 else 0)
        else:
            torch.testing.assert_close(
                out[name], value, rtol=2.0**-16, atol=2.0**-26 if dtype == torch.bfloat16 else 2.0**-24
            )
    loss = model(torch.randn(4, 32, dtype=dtype)).float().square().mean()
    loss.backward()
    with engine("reference"):
        optimizer.step()
