"""Put a weight update under an optimizer that halfulp does not have, and keep an average of the weights in 16 bits."""

import torch

import halfulp as hu

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)).bfloat16()
opt = hu.optim.wrap(torch.optim.NAdam, model.named_parameters(), lr=1e-3, weight_update="kahan", report_interval=10)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=200)
ema = hu.optim.EMA(model, decay=0.9, optimizer=opt)

inputs = torch.randn(256, 32).bfloat16()
targets = inputs[:, :3].sum(1, keepdim=True)
for _ in range(200):
    loss = (model(inputs) - targets).square().mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    opt.zero_grad()
    schedule.step()
    ema.update()

print(f"loss {loss.item():.4f}")
with ema.apply(), torch.no_grad():
    print(f"loss of the averaged weights {(model(inputs) - targets).square().mean().item():.4f}")
print(opt.report())
