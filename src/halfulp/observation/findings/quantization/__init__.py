"""What quantizers and blocks do to a tensor: zeros, saturation, noise above the signal."""
