"""A small model, its steps and its optimizer, for tests of what is saved."""

import io

import torch

from halfulp.kernels import engine

from ...laws.optim.cases import CODECS, build


def make_model(seed=0, dtype=torch.bfloat16):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.LayerNorm(64), torch.nn.Linear(64, 8))
    return model.to(dtype)


def set_gradients(model, step):
    generator = torch.Generator().manual_seed(1000 + step)
    for parameter in model.parameters():
        parameter.grad = (torch.randn(parameter.shape, generator=generator) * 0.01).to(parameter.dtype)


def take_steps(model, optimizer, first, last):
    with engine("reference"):
        for step in range(first, last):
            set_gradients(model, step)
            optimizer.step()


def make_optimizer(update, codec, model, rule="adamw"):
    return build(rule, update, model.named_parameters(), state_dtype=CODECS[codec], seed=5)


def through_disk(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)
