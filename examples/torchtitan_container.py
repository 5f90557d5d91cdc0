"""Put an optimizer for bfloat16 weights into torchtitan's container by its name."""

import torch
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig

import halfulp as hu
from halfulp.integrations.torchtitan import register

register()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.LayerNorm(32), torch.nn.Linear(32, 4)).bfloat16()
options = {"lr": 3e-3, "weight_decay": 0.1, "weight_update": "split8"}
group = ParamGroupConfig(pattern=".*", optimizer_name="halfulp.AdamW", optimizer_kwargs=options)
container = OptimizersContainer(OptimizersContainer.Config(param_groups=[group]), model_parts=[model])

inputs = torch.randn(256, 16)
labels = inputs[:, :4].argmax(1)
for _ in range(120):
    loss = torch.nn.functional.cross_entropy(model(inputs.bfloat16()).float(), labels)
    loss.backward()
    container.step()
    container.zero_grad()
print(f"loss {loss.item():.3f}; the state holds {len(container.state_dict())} entries")
print(hu.contract(model, container.optimizers))
assert loss.item() < 0.5
