"""Measured claims, side by side with peers: one file per claim, every figure kept in results/."""
