"""The fused step of all parameters of one kind."""
