"""A Hugging Face model with multi-component parameters, unmodified."""

import copy

import pytest
import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
)

from halfulp.mctensor import MCTensor
from halfulp.mctensor._convert_model import multicomponent
from halfulp.subclass import strict
from halfulp.subclass.models._conversion import fallbacks


def llama(attention: str) -> LlamaForCausalLM:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 61}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, attn_implementation=attention))


def measured(model: LlamaForCausalLM, ids: torch.Tensor) -> tuple[float, dict[str, torch.Tensor]]:
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    plain = {name: g.decode() if isinstance(g, MCTensor) else g.double() for name, g in grads.items()}
    return float(loss.detach().decode() if isinstance(loss, MCTensor) else loss.detach()), plain


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(
    ("dtype", "twin", "most"), [(torch.bfloat16, torch.float32, 1e-4), (torch.float32, torch.float64, 1e-6)]
)
def test_loss_and_gradients_agree_with_the_wider_type(dtype, twin, most, attention, seed):
    start = llama(attention)
    ids = torch.randint(61, (2, 16))
    model = multicomponent(copy.deepcopy(start), 2, dtype, gradients="components")
    with strict():
        loss, ours = measured(model, ids)
    assert fallbacks(model) == {}
    wanted_loss, wanted = measured(start.to(twin), ids)
    assert abs(loss - wanted_loss) <= most * wanted_loss
    assert ours.keys() == wanted.keys()
    for name, value in wanted.items():
        assert (ours[name] - value).abs().max() <= most * value.abs().max(), name


def test_plain_bfloat16_does_not(seed):
    """The control: the bounds above tell two components from one."""
    start = llama("sdpa")
    ids = torch.randint(61, (2, 16))
    model = multicomponent(copy.deepcopy(start), 1, torch.bfloat16)
    _, ours = measured(model, ids)
    _, wanted = measured(start, ids)
    assert max((ours[name] - wanted[name]).abs().max() / wanted[name].abs().max() for name in wanted) > 1e-3


def test_generation_gives_the_same_text(seed):
    start = llama("sdpa")
    ids = torch.randint(61, (1, 4))
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    wanted = start.generate(ids, **options)
    assert torch.equal(multicomponent(start, 2, torch.float32).generate(ids, **options), wanted)


MIXTURES = {
    "mixtral": (MixtralForCausalLM, MixtralConfig, {"num_local_experts": 4}),
    "qwen2-moe": (
        Qwen2MoeForCausalLM,
        Qwen2MoeConfig,
        {"num_experts": 4, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8},
    ),
    "deepseek-v3": (
        DeepseekV3ForCausalLM,
        DeepseekV3Config,
        {
            **{"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 8},
            **{"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8},
            "first_k_dense_replace": 0,
        },
    ),
}


@pytest.mark.parametrize("name", MIXTURES)
def test_mixtures_of_experts_train(name, seed):
    """torch's grouped products have no float64: the twin calls its experts one by one."""
    model, config, more = MIXTURES[name]
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 32, "pad_token_id": 0}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 16}
    start = model(config(**sizes, **heads, **more, num_experts_per_tok=2))
    ids = torch.randint(1, 32, (2, 8))
    twin = copy.deepcopy(start).double()
    twin.set_experts_implementation("eager")
    for components, dtype, most in ((2, torch.bfloat16, 2e-3), (2, torch.float32, 1e-5)):
        ours = multicomponent(copy.deepcopy(start), components, dtype)
        with strict():
            losses = trained(ours, ids)
        assert losses == pytest.approx(trained(copy.deepcopy(twin), ids), rel=most)
        assert losses[-1] < losses[0]


def trained(model, ids: torch.Tensor) -> list[float]:
    """Losses of three steps."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.5), []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        losses.append(float(loss.detach()))
        loss.backward()
        optimizer.step()
    return losses
