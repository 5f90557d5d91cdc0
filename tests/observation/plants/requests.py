"""Plants of requests that were not met."""

import tempfile
from pathlib import Path

import torch
from torch import nn

import halfulp as hu

from .plant import Measured, Run, batch, mlp, plant, steps

BF16 = torch.bfloat16


@plant("state-mismatch")
def state_mismatch(faulty: bool) -> Run:
    """The model is cast after the optimizer has made its states."""
    model = mlp(BF16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)

    def step(dtype: torch.dtype) -> None:
        x, y = batch(dtype)
        nn.functional.mse_loss(model(x).float(), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    if faulty:
        step(BF16)
    model.float()
    return Run(model, optimizer, lambda: [step(torch.float32) for _ in range(10)])


@plant("dtype-not-asked")
def dtype_not_asked(faulty: bool) -> Run:
    """Norms are to be float32; a cast took one along."""
    model = mlp()
    if faulty:
        model[1].to(BF16)
        model[1].register_forward_pre_hook(lambda module, given: (given[0].to(BF16),))
        model[1].register_forward_hook(lambda module, given, out: out.float())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return Run(model, optimizer, steps(model, optimizer, 8), {"expect": {"1": torch.float32}})


@plant("pattern-empty")
def pattern_empty(faulty: bool) -> Run:
    """The head is called otherwise."""
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return Run(model, optimizer, steps(model, optimizer, 8), {"expect": {"lm_head" if faulty else "3": torch.float32}})


@plant("dtype-changed-on-resume")
def dtype_changed_on_resume(faulty: bool) -> Measured:
    """One layer comes back in bfloat16."""

    def findings() -> list[hu.observation.Finding]:
        model = mlp()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with tempfile.TemporaryDirectory() as folder:
            before, after = Path(folder) / "before.pt", Path(folder) / "after.pt"
            torch.save(model.state_dict(), before)
            steps(model, optimizer, 10)()
            if faulty:
                model[0].to(BF16)
            torch.save(model.state_dict(), after)
            return hu.audit(before, after).findings

    return Measured(findings)
