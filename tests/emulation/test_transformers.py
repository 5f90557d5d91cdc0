"""Hugging Face models of random small configurations."""

import io

import pytest
import torch

from halfulp.emulation import emulate
from halfulp.kernels import same_bits
from halfulp.rounding import quantize

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


def gpt2(attention):
    config = transformers.GPT2Config(
        vocab_size=31, n_positions=16, n_embd=16, n_layer=2, n_head=2, attn_implementation=attention,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=None,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def llama(attention):
    config = transformers.LlamaConfig(
        vocab_size=31, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, attn_implementation=attention, bos_token_id=0, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def holds(x, format):
    return same_bits(x, quantize(x, format))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("build", [gpt2, llama])
@pytest.mark.parametrize("format", ["bf16", "e8m3"])
def test_everything_is_rounded(seed, build, attention, format):
    model = build(attention)
    names = list(model.state_dict())
    emulate(model, format)
    tokens = torch.randint(31, (2, 10))
    out = model(input_ids=tokens, labels=tokens, output_hidden_states=True)
    out.loss.backward()
    assert list(model.state_dict()) == names
    assert all(holds(h, format) for h in (out.logits, out.loss, *out.hidden_states))
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.any(), name
        assert holds(parameter.grad, format), name


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_gives_the_same_bits(seed, reentrant):
    model = llama("sdpa").train()
    emulate(model, "e8m3")
    tokens = torch.randint(31, (2, 10))
    model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    want = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, want[name]), name


def test_generation_and_saving(seed):
    model = gpt2("sdpa").eval()
    emulate(model, "bf16")
    tokens = torch.randint(1, 31, (1, 4))  # generate takes a 0 for padding, and masks it
    longer = model.generate(tokens, max_new_tokens=4, do_sample=False, pad_token_id=0)
    with torch.no_grad():
        step = torch.cat([tokens, model(tokens).logits[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(longer[:, :5], step)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    gpt2("sdpa").load_state_dict(torch.load(file, weights_only=True))
