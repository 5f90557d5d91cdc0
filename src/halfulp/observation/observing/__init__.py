"""Watching a run: hooks on optimizers, modules and gradients, attached for sampled steps alone."""
