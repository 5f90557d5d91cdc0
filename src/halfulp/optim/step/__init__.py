"""The fused step of all parameters of one step specification."""
