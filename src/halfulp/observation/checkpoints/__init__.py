"""Checkpoints of any layout, read by memory map, tensor by tensor, and without executing anything that they hold."""
