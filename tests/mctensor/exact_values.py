"""The exact values of MCTensors."""

from fractions import Fraction

from halfulp.mctensor import MCTensor
from halfulp.mctensor._encode import compute_exact_values


def exact(x: MCTensor) -> list[Fraction | float]:
    """Every element's exact value, flattened; infinities and NaN as floats."""
    return compute_exact_values(x.components, x.scale)
