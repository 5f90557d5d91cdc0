"""Policies: which exponent follows from what was measured."""
