"""Policies: the rules that set exponents from measurements."""
