"""Plants of what becomes of updates."""

import torch

import halfulp as hu

from .plant import Measured, Run, mlp, plant, steps

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
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, betas=(0.9, 0.9))
    return Run(model, optimizer, steps(model, optimizer, dtype=dtype))


@plant("never-stepped")
def never_stepped(faulty: bool) -> Run:
    """The optimizer was made before the last layer was replaced."""
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if faulty:
        model[-1] = torch.nn.Linear(64, 4)
    return Run(model, optimizer, steps(model, optimizer))


class RandomSGD(torch.optim.SGD):
    """SGD that rounds bfloat16 weights stochastically, by bits that are drawn anew or repeat."""

    bf16_stochastic_round = True  # as torchao's optimizers say it

    def __init__(self, params, lr: float = 1e-3, repeats: bool = False) -> None:
        super().__init__(params, lr=lr)
        self.generator, self.repeats = torch.Generator().manual_seed(7), repeats

    @torch.no_grad()
    def step(self, closure=None):
        if self.repeats:
            self.generator.manual_seed(7)
        for group in self.param_groups:
            for parameter in group["params"]:
                wanted = parameter - group["lr"] * parameter.grad
                if parameter.dtype == BF16:
                    wanted = parameter.float() - group["lr"] * parameter.grad.float()
                    noise = torch.randint(0, 1 << 16, wanted.shape, generator=self.generator, dtype=torch.int32)
                    wanted = ((wanted.view(torch.int32) + noise) & ~0xFFFF).view(torch.float32)
                parameter.copy_(wanted)


@plant("random-bits-repeat")
def random_bits_repeat(faulty: bool) -> Run:
    """A seed that is set again in each step."""
    hu.observation.register_elementwise(RandomSGD)
    model = mlp(BF16)
    optimizer = RandomSGD(model.parameters(), lr=1e-2, repeats=faulty)
    return Run(model, optimizer, steps(model, optimizer, 40, BF16))


@plant("freeze-ahead")
def freeze_ahead(faulty: bool) -> Measured:
    """A cosine schedule to zero, in bfloat16 and in float32."""
    model = mlp(BF16 if faulty else torch.float32)
    return Measured(lambda: hu.forecast(model, 3e-4, "cosine", steps=100, weight_decay=0.0, betas=(0.9, 0.9)).findings)
