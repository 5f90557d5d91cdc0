"""Watching what changes: gradients that add up, updates, states and averages, beside what was wanted."""
