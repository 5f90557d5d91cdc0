"""Arithmetic on payloads and scales in one launch where they lie on an accelerator."""
