"""Rescaling: statistics of payloads, and where and how a model brings them back to a magnitude of about 1."""
