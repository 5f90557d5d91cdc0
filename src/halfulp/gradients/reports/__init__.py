"""Reports of a scaler's sites and steps: tables, and files written during training."""
