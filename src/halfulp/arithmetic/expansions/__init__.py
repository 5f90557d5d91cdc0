"""Arithmetic on expansions, unevaluated sums of components: element by element and along dimensions."""
