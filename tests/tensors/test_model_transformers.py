"""A Hugging Face model with multi-component parameters, unmodified."""

import copy

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from halfulp.tensors import MCTensor, strict
from halfulp.tensors._model import multicomponent
from halfulp.tensors._model_fallbacks import fallbacks


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
