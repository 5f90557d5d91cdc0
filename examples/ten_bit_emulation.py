"""Train as if every operator worked in 10 bits (e8m1): updates rounded to nearest stall, the others learn."""

import torch

import halfulp as hu


def train(weight_update: str, steps: int = 300) -> float:
    """The share of right answers after training with one weight update."""
    torch.manual_seed(0)
    inputs = torch.randn(512, 16)
    labels = (inputs[:, 0] > inputs[:, 1]).long()
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
    with hu.emulate(model, "e8m1"):
        opt = hu.optim.SGD(
            model.named_parameters(),
            lr=0.02,
            momentum=0.9,
            format="e8m1",
            weight_update=weight_update,
            report_interval=0,
        )
        for _ in range(steps):
            chosen = torch.randint(len(inputs), (32,))
            torch.nn.functional.cross_entropy(model(inputs[chosen]), labels[chosen]).backward()
            opt.step()
            opt.zero_grad()
        return (model(inputs).argmax(1) == labels).float().mean().item()


print(hu.formats.e8m1)
for update in ("nearest", "stochastic", "kahan", "kahan-stochastic"):
    print(f"{update:17} {train(update):.1%}")
