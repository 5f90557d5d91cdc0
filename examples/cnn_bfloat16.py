"""Train a residual network with batch norms in bfloat16: one call converts it, a second one undoes it."""

import torch
from torch import nn

import halfulp as hu


class Residual(nn.Module):
    """Two convolutions beside a path that skips them."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of the shape of x."""
        return torch.relu(x + self.second_norm(self.second(torch.relu(self.first_norm(self.first(x))))))


torch.manual_seed(0)
stem = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
model = nn.Sequential(stem, Residual(16), Residual(16), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 4))
images = torch.randn(256, 1, 8, 8)
labels = images.view(256, 2, 4, 2, 4).mean((2, 4)).flatten(1).argmax(1)  # the brightest quarter

print(hu.explain(model, "bf16-split8"))
hu.convert(model, "bf16-split8")
opt = hu.recipes.optimizer(model, "AdamW", lr=3e-3)
for step in range(60):
    chosen = torch.randint(len(images), (64,))
    loss = nn.functional.cross_entropy(model(images[chosen]), labels[chosen])
    loss.backward()
    opt.step()
    opt.zero_grad()
    if step % 20 == 19:
        print(f"step {step + 1}: loss {loss.item():.3f}")
print(f"{opt.bytes_per_parameter():.2f} bytes per parameter, gradient included")

weights = opt.float32_state_dict(model)  # with the bits that the optimizer holds
del opt
hu.revert(model).load_state_dict(weights)
model.eval()
accuracy = (model(images).argmax(1) == labels).float().mean().item()
print(f"float32 again, accuracy {accuracy:.2f}")
