"""Plants of what becomes of updates."""

import torch

from .plant import Run, mlp, plant, steps

BF16 = torch.bfloat16


@plant("updates-lost")
def updates_lost(faulty: bool) -> Run:
    dtype = BF16 if faulty else torch.float32
    model = mlp(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-5)
    return Run(model, optimizer, steps(model, optimizer, dtype=dtype))


@plant("weight-frozen")
def weight_frozen(faulty: bool) -> Run:
    """Something writes the first value back after each step."""
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    kept = model[0].weight.detach().clone()

    def write_back(*_) -> None:
        with torch.no_grad():
            model[0].weight.copy_(kept)

    train = steps(model, optimizer)
    if faulty:
        model.register_forward_pre_hook(write_back)
        return Run(model, optimizer, lambda: (train(), write_back()))
    return Run(model, optimizer, train)


@plant("weight-decay-lost")
def weight_decay_lost(faulty: bool) -> Run:
    dtype = BF16 if faulty else torch.float32
    model = mlp(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1, betas=(0.9, 0.9))
    return Run(model, optimizer, steps(model, optimizer, dtype=dtype))


@plant("never-stepped")
def never_stepped(faulty: bool) -> Run:
    """The optimizer was made before the last layer was replaced."""
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if faulty:
        model[-1] = torch.nn.Linear(64, 4)
    return Run(model, optimizer, steps(model, optimizer))
