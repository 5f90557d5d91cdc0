"""Train a model of timm in bfloat16 by an optimizer that timm's factory makes by name."""

import timm
import torch

import halfulp as hu
from halfulp.integrations.timm import register

register()
torch.manual_seed(0)
model = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, num_classes=4)
optimizer = timm.optim.create_optimizer_v2(model, "huadamw", lr=1e-3, param_dtype="bf16", weight_update="split8")
images = torch.randn(16, 3, 32, 32, dtype=torch.bfloat16)
labels = torch.arange(16) % 4
for _ in range(8):
    loss = torch.nn.functional.cross_entropy(model(images).float(), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(f"loss {loss.item():.3f}")
print(hu.contract(model, optimizer))
assert loss.item() < 1.0
