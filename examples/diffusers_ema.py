"""Average the bfloat16 weights of a diffusers model by diffusers' own methods, and save the averages."""

import tempfile

import torch
from diffusers import UNet2DModel

import halfulp as hu
from halfulp.integrations.diffusers import EMAModel

torch.manual_seed(0)
unet = UNet2DModel(
    sample_size=8, block_out_channels=(8, 8), norm_num_groups=4, layers_per_block=1,
    down_block_types=("DownBlock2D",) * 2, up_block_types=("UpBlock2D",) * 2,
)  # fmt: skip
optimizer = hu.AdamW(unet.named_parameters(), lr=1e-3, param_dtype="bf16", weight_update="split8")
ema = EMAModel(unet, decay=0.999, optimizer=optimizer, model_cls=UNet2DModel, model_config=unet.config)
for _ in range(10):
    noise = torch.randn(4, 3, 8, 8, dtype=torch.bfloat16)
    (unet(noise, 10).sample.float() - noise.float()).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    ema.step(unet.parameters())

ema.store(unet.parameters())
ema.copy_to(unet.parameters())
print("shown: the averages")
ema.restore(unet.parameters())
with tempfile.TemporaryDirectory() as folder:
    ema.save_pretrained(folder)
    saved = UNet2DModel.from_pretrained(folder)
print(ema.ema)
print(hu.contract(unet, optimizer))
assert saved.conv_in.weight.dtype == torch.float32
