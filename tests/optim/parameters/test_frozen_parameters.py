"""Adapters beside frozen weights: a weight update that nothing which trains can use is said not to work."""

import functools
import warnings

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


SAID = (
    r"weight_update='kahan' does nothing: .* frozen here \(such as (base.weight|#0)\), .* float32 \(such as "
    r"(lora_A.weight|#2)\).*give param_dtype=torch.bfloat16"
)
SILENT = {
    "none chosen": lambda model: hu.optim.AdamW(model.parameters()),
    "narrowed": lambda model: hu.optim.AdamW(model.parameters(), weight_update="kahan", param_dtype=torch.bfloat16),
    "a format": lambda model: hu.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], weight_update="kahan", format="e4m3fn"
    ),
    "unfrozen": lambda model: hu.optim.AdamW(model.requires_grad_().parameters(), weight_update="kahan"),
    "all frozen": lambda model: hu.optim.AdamW(model.requires_grad_(False).parameters(), weight_update="kahan"),
    "in a group of their own": lambda model: hu.optim.AdamW(
        [{"params": list(model.base.parameters()), "weight_update": "kahan"}, {"params": [model.lora_A.weight]}]
    ),
}


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("kind", ["AdamW", "SGD", "wrap"])
def test_float32_adapters_over_frozen_weights_are_said_to_take_no_weight_update(kind, named):
    model = _Adapted()
    given = model.named_parameters() if named else model.parameters()
    make = functools.partial(hu.optim.wrap, torch.optim.RMSprop) if kind == "wrap" else getattr(hu.optim, kind)
    with pytest.warns(RuntimeWarning, match=SAID) as said:
        make(given, lr=0.1, weight_update="kahan")
    assert len(said) == 1


def test_it_is_said_for_each_weight_update_and_for_groups_that_come_later():
    model, other = _Adapted(), _Adapted()
    groups = [
        {"params": list(model.base.parameters())},
        {"params": [model.lora_A.weight]},
        {"params": [*other.base.parameters(), other.lora_A.weight], "weight_update": "stochastic"},
    ]
    with pytest.warns(RuntimeWarning) as said:
        optimizer = hu.optim.AdamW(groups, weight_update="kahan")
    assert sorted(str(one.message)[:26].split("'")[1] for one in said) == ["kahan", "stochastic"]
    third = _Adapted()
    with pytest.warns(RuntimeWarning, match="weight_update='master' does nothing"):
        optimizer.add_param_group({"params": list(third.parameters()), "weight_update": "master"})


def test_weights_that_were_frozen_later_are_seen_at_the_first_step_and_said_once():
    model = _Adapted().requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer = hu.optim.AdamW(model.parameters(), lr=0.1, weight_update="kahan")
    model.base.requires_grad_(False)
    for adapter in (model.lora_A, model.lora_B):
        adapter.weight.grad = torch.ones_like(adapter.weight)
    with pytest.warns(RuntimeWarning, match=SAID) as said:
        optimizer.step()
    assert len(said) == 1
    with pytest.warns(RuntimeWarning, match=SAID):
        optimizer = hu.optim.AdamW(model.parameters(), lr=0.1, weight_update="kahan")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
        optimizer.step()


@pytest.mark.parametrize("kind", SILENT)
def test_nothing_is_said_where_it_acts_or_none_was_chosen(kind):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SILENT[kind](_Adapted())


def test_adapters_alone_in_float32_are_refused_by_name():
    model = _Adapted()
    with pytest.raises(ValueError, match=r"all of these are float32 \(such as lora_A\.weight\)"):
        hu.optim.AdamW([(name, p) for name, p in model.named_parameters() if p.requires_grad], weight_update="kahan")


def test_kept_norms_beside_frozen_weights_are_meant():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8))
    hu.convert(model, "bf16-kahan")
    model[0].requires_grad_(False)
    hu.recipes.optimizer(model, "AdamW", lr=1e-3)


def test_peft_adapters_are_said_and_follow_the_cure(seed):
    peft = pytest.importorskip("peft")
    torch.manual_seed(seed)
    config = peft.LoraConfig(r=2, target_modules=["0"])

    def adapted():
        return peft.get_peft_model(torch.nn.Sequential(torch.nn.Linear(8, 8)).bfloat16(), config)

    model = adapted()
    with pytest.warns(RuntimeWarning, match=r"float32 \(such as base_model\.model\.0\.lora_A\.default\.weight\)"):
        hu.optim.AdamW(model.named_parameters(), lr=1e-4, weight_update="kahan")
    model = adapted()
    optimizer = hu.optim.AdamW(model.parameters(), lr=1e-4, weight_update="kahan", param_dtype=torch.bfloat16)
    adapter = model.base_model.model[0].lora_A.default.weight
    assert adapter.dtype == torch.bfloat16
    model(torch.ones(2, 8, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    assert "residual" in optimizer.state[adapter]
