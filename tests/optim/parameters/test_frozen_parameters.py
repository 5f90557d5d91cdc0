"""Adapters beside frozen weights: a weight update that nothing can use is refused, narrowed adapters use it."""

import pytest
import torch

import halfulp as hu


class _Adapted(torch.nn.Module):
    """A frozen bfloat16 layer and float32 adapters, as PEFT adds them."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.base = torch.nn.Linear(8, 8).bfloat16().requires_grad_(False)
        self.lora_A = torch.nn.Linear(8, 2, bias=False, dtype=dtype)
        self.lora_B = torch.nn.Linear(2, 8, bias=False, dtype=dtype)


def test_adapters_alone_in_float32_are_refused_by_name():
    model = _Adapted()
    with pytest.raises(ValueError, match=r"all of these are float32 \(such as lora_A\.weight\)"):
        hu.optim.AdamW([(name, p) for name, p in model.named_parameters() if p.requires_grad], weight_update="kahan")


def test_kept_norms_beside_frozen_weights_are_meant():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8))
    hu.convert(model, "bf16-kahan")
    model[0].requires_grad_(False)
    hu.recipes.optimizer(model, "AdamW", lr=1e-3)


def test_peft_adapters_may_be_narrowed(seed):
    peft = pytest.importorskip("peft")
    torch.manual_seed(seed)
    config = peft.LoraConfig(r=2, target_modules=["0"])
    model = peft.get_peft_model(torch.nn.Sequential(torch.nn.Linear(8, 8)).bfloat16(), config)
    optimizer = hu.optim.AdamW(model.parameters(), lr=1e-4, weight_update="kahan", param_dtype=torch.bfloat16)
    adapter = model.base_model.model[0].lora_A.default.weight
    assert adapter.dtype == torch.bfloat16
    model(torch.ones(2, 8, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    assert "residual" in optimizer.state[adapter]
