"""Traces run on tensors by plain torch operations."""
