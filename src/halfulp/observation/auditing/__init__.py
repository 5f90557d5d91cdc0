"""Two checkpoints of one run compared: what moved, what rounding must have lost, what is broken."""
