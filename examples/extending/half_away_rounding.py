"""A rounding of one's own: to nearest, ties away from zero, as in C's round() and in decimal arithmetic at school."""

import halfulp as hu


@hu.rounding.register_rounding
class HalfAway(hu.rounding.Rounding):
    """The nearer neighbour; at a tie the one farther from zero (IEEE 754-2019, 4.3.1, roundTiesToAway)."""

    name = "half_away"

    @staticmethod
    def goes_away(fraction, half, odd, negative):
        """Half a spacing goes away from zero."""
        return fraction >= half
