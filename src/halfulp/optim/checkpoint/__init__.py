"""State dicts and checkpoints: saving, validation, and states saved by other optimizers."""
