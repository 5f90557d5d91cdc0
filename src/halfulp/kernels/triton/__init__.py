"""Recorded device functions as Triton source."""
