"""A policy of gradient exponents of one's own: those of "amax" in steps of four, so that they seldom change."""

import dataclasses

import halfulp as hu
from halfulp.gradients import Amax


@dataclasses.dataclass(frozen=True)
class Coarse(Amax):
    """The exponent of "amax", rounded down to a multiple of four."""

    name = "coarse"

    def exponent(self, site):
        """At most three powers of two below what "amax" would take."""
        exact = super().exponent(site)
        return None if exact is None else exact // 4 * 4


hu.recipes.register(
    hu.Recipe(
        name="e5m2-coarse",
        description="gradients in e5m2, exponents in steps of four",
        gradient_format="e5m2",
        gradient_scale="coarse",
    )
)
