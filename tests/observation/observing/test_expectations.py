"""What was asked for beside what is there: a resumed run's contract, formats that tensors are quantized to."""

import pytest
import torch
from torch import nn

import halfulp as hu


def run(dtype=torch.bfloat16, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)).to(dtype)
    if dtype == torch.bfloat16:
        options = {"weight_update": "kahan", **options}
    optimizer = hu.optim.AdamW(model.named_parameters(), lr=1e-2, **options)
    train(model, optimizer)
    return model, optimizer


def train(model, optimizer, steps=2):
    for _ in range(steps):
        model(torch.randn(4, 6, dtype=next(model.parameters()).dtype)).float().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def resumed(held, model, optimizer):
    with hu.observe(model, optimizer, interval=1, expect=held) as seen:
        train(model, optimizer)
    return seen, [finding for finding in seen.findings if finding.code == "dtype-changed-on-resume"]


def forms(held):
    return [held, held.to_dict(), {"model": {}, "precision_contract": held.to_dict()}, held.metadata()]


@pytest.mark.parametrize("form", range(4))
def test_a_run_that_came_back_as_it_was_is_silent(form):
    held = hu.contract(*run())
    seen, found = resumed(forms(held)[form], *run())
    assert not found
    (one,) = [one for one in seen.record.expectations if one.source == "contract"]
    assert one.asked == "bf16"
    assert sorted(one.matched) == sorted(held.tensors)
    assert not any(finding.code in ("dtype-not-asked", "pattern-empty") for finding in seen.findings)
    assert "contract" in str(seen.to_dict()["record"]["expectations"])


def test_another_dtype_is_found_by_name():
    held = hu.contract(*run())
    model, optimizer = run(torch.float32)
    seen, (dtype,) = resumed(held, model, optimizer)
    assert dtype.severity == "error"
    assert set(dtype.where) == set(held.tensors)
    assert "the contract says bf16, states residual bfloat16 and exp_avg bfloat16 and" in str(dtype)
    assert "weight_update kahan, the resumed run has fp32, " in str(dtype)
    assert seen.findings[0].code == "dtype-changed-on-resume"


def test_one_layer_states_and_weight_updates_are_found():
    held = hu.contract(*run())
    model, optimizer = run(weight_update="stochastic", state_dtype=torch.float32)
    _, found = resumed(held, model, optimizer)
    words = " ".join(map(str, found))
    assert "the contract says " in words
    assert "weight_update kahan" in words
    assert "the resumed run has " in words
    assert "stochastic" in words
    assert "exp_avg bfloat16" in words
    assert "exp_avg float32" in words
    model = run()[0]
    model[1].float()
    model[1].register_forward_pre_hook(lambda module, given: (given[0].float(),))
    model[1].register_forward_hook(lambda module, given, out: out.bfloat16())
    optimizer = hu.optim.AdamW(model.named_parameters(), lr=1e-2, weight_update="kahan")
    _, found = resumed(held, model, optimizer)
    assert {name for one in found for name in one.where} == {"1.weight", "1.bias"}


def test_other_tensors_are_named_and_a_cast_after_the_run_is_not_the_runs():
    held = hu.contract(*run())
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8)).bfloat16()
    optimizer = hu.optim.AdamW(model.named_parameters(), lr=1e-2, weight_update="kahan")
    _, found = resumed(held, model, optimizer)
    (missing,) = found
    assert set(missing.where) == {"2.weight", "2.bias"}
    assert "absent" in missing.summary
    model, optimizer = run()
    with hu.observe(model, optimizer, interval=1, expect=held) as seen:
        train(model, optimizer)
    model.half()
    assert not [finding for finding in seen.findings if finding.code == "dtype-changed-on-resume"]


def test_without_an_optimizer_dtypes_are_compared():
    held = hu.contract(*run())
    model = run(torch.float32)[0]
    with hu.observe(model, expect=held) as seen:
        pass
    assert [finding.code for finding in seen.findings if finding.severity == "error"][:1] == ["dtype-changed-on-resume"]


def test_what_is_no_contract_is_refused():
    model, optimizer = run()
    damaged = {"version": 1, "tensors": {"0.weight": {"color": "red"}}}
    with pytest.raises(ValueError, match=r"damaged: save it anew"):
        hu.observe(model, optimizer, expect=damaged)
    with pytest.raises(ValueError, match="update halfulp"):
        hu.observe(model, optimizer, expect={"version": 99, "tensors": {}})
    with pytest.raises(TypeError, match=r"a dict such as .*, or a hu\.contract, got a str"):
        hu.observe(model, optimizer, expect="last.pt")


def watched(quantized, dtype=torch.float32):
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3)).to(dtype)
    with hu.observe(model, None, quantized=quantized) as seen:
        out = model(torch.randn(4, 5, dtype=dtype))
        out.square().sum().backward()
    return model, out, seen.record


@pytest.mark.parametrize("format", ["e2m1fn", "mxfp4", "nvfp4", "fp16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_error_is_that_of_quantize(format, dtype, seed):
    _, out, record = watched({"1": format}, dtype)
    there = record.tensors["activation", "1"]
    assert there.asked_format == format
    flat = out.detach().float().reshape(-1)
    block = {"mxfp4": 32, "nvfp4": 16}.get(format, 1)
    padded = torch.nn.functional.pad(flat, (0, -len(flat) % block))
    expected = (hu.quantize(padded, format)[: len(flat)].double() - flat.double()).square().mean().sqrt()
    assert there.quantization_error == pytest.approx(float(expected), rel=1e-6, abs=1e-12)
    assert format in there.formats
    assert record.tensors["activation gradient", "1"].asked_format == format
    assert record.tensors["activation", "0"].asked_format is None
    assert record.tensors["weight gradient", "1.weight"].asked_format is None


def test_values_that_are_not_finite_are_left_out(seed):
    model = torch.nn.Sequential(torch.nn.Linear(5, 7))
    with torch.no_grad():
        model[0].bias[0] = torch.nan
    with hu.observe(model, None, quantized={"0": "mxfp4"}) as seen:
        model(torch.randn(4, 5))
    assert seen.record.tensors["activation", "0"].quantization_error < 10


def test_wrong_requests_are_refused():
    model = torch.nn.Sequential(torch.nn.Linear(5, 7))
    with pytest.raises(ValueError, match=r"'head' matches no module: take names from model.named_modules\(\)"):
        hu.observe(model, quantized={"head": "mxfp4"})
    with pytest.raises(TypeError, match="quantized= takes a dict"):
        hu.observe(model, quantized="mxfp4")
    with pytest.raises(ValueError, match="unknown block format"):
        hu.observe(model, quantized={"0": "mxfp5"})
