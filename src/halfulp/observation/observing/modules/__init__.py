"""Watching modules: their outputs, the gradients that come back, running statistics, second runs."""
