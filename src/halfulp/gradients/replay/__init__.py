"""Replays: forward passes with a known autograd graph get their edges without a function mode."""
