"""Fine-tune a float32 model in bfloat16 plus 8 bits, with 8-bit moments: about 7 bytes per parameter instead of 16."""

import torch

import halfulp as hu

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(32, 128), torch.nn.LayerNorm(128), torch.nn.GELU(), torch.nn.Linear(128, 4))
inputs = torch.randn(512, 32)
labels = inputs[:, :4].argmax(1)

opt = hu.optim.AdamW(
    model.named_parameters(), lr=1e-3, param_dtype=torch.bfloat16, state_dtype="8bit", report_interval=10
)
for step in range(100):
    chosen = torch.randint(len(inputs), (64,))
    loss = torch.nn.functional.cross_entropy(model(inputs[chosen].bfloat16()).float(), labels[chosen])
    loss.backward()
    opt.step()
    opt.zero_grad()
    if step % 25 == 24:
        print(f"step {step + 1}: loss {loss.item():.3f}")

print(opt.report())
print(f"{opt.bytes_per_parameter():.2f} bytes per parameter, gradient included")
torch.save(opt.float32_state_dict(model), "float32_weights.pt")
