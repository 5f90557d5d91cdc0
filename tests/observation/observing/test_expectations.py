"""What was asked for beside what is there: dtypes, and formats that tensors are quantized to."""

import pytest
import torch
from torch import nn

import halfulp as hu


def test_a_contract_and_formats_without_a_dtype_are_refused():
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match=r"a dict such as .*, got a Contract; .*contract.check\(model, optimizer\)"):
        hu.observe(model, optimizer, expect=hu.contract(model, optimizer))
    with pytest.raises(TypeError, match=r"got 'version': an int; a hu.contract .* contract.check\(model, optimizer\)"):
        hu.observe(model, optimizer, expect=hu.contract(model, optimizer).to_dict())
    with pytest.raises(ValueError, match="torch has none for e2m1fn: quantized="):
        hu.observe(model, optimizer, expect={"*": "e2m1fn"})


def test_a_head_that_is_tied_to_another_module_is_compared_by_its_own_name():
    model = nn.ModuleDict({"embed": nn.Embedding(3, 2), "head": nn.Linear(2, 3, bias=False)})
    model["head"].weight = model["embed"].weight
    with hu.observe(model, None, expect={"head": "bf16"}) as seen:
        model["head"](model["embed"](torch.tensor([1]))).sum().backward()
    (found,) = [one for one in seen.findings if one.code == "dtype-not-asked"]
    assert "head.weight" in found.where


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
    odd = hu.BlockFormat("odd", hu.formats.e2m1fn, hu.formats.e8m0, 48)
    with pytest.raises(ValueError, match="blocks of 48 elements"):
        hu.observe(model, quantized={"0": odd})
    with pytest.raises(TypeError, match="quantized= takes a dict"):
        hu.observe(model, quantized="mxfp4")
    with pytest.raises(ValueError, match="unknown block format"):
        hu.observe(model, quantized={"0": "mxfp5"})
