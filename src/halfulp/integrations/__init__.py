"""One module per trainer, imported when named: transformers, accelerate, lightning, torchtitan, timm, diffusers."""
