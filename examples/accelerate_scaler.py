"""Scale the gradients of a float16 model layer by layer in a loop of accelerate."""

import torch
from accelerate import Accelerator
from torch import nn

import halfulp as hu
from halfulp.integrations.accelerate import use_scaler

torch.manual_seed(0)
inputs = torch.randn(512, 32)
labels = inputs[:, :4].argmax(1)
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

accelerator = Accelerator(cpu=True)
scaler = use_scaler(accelerator, model, format="fp16")  # gradients in float16's range, as on a GPU under autocast
model, optimizer = accelerator.prepare(model, optimizer)
for _ in range(60):
    chosen = torch.randint(512, (64,))
    loss = nn.functional.cross_entropy(model(inputs[chosen]), labels[chosen]) * 1e-6  # far below float16's range
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()

accuracy = (model(inputs).argmax(1) == labels).float().mean().item()
print(f"accuracy {accuracy:.2f}")
print(scaler.sites())
print(hu.contract(model, optimizer))
assert accuracy > 0.7
