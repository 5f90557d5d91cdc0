"""How far two computations of one output may be apart: what another order of summation explains."""

from ... import formats
from ..record._record import Difference

# Another order of a layer's sums changes a float32 result by some units in the last place; a rounding to 16 bits that
# one side leaves out is thousands of them.
UNITS = 64
FLOAT32 = 2.0**-23


def explained_by_order(difference: Difference) -> bool:
    """Return whether float32 sums in another order, rounded once more to the outputs' own format, explain it."""
    try:
        eps = max(formats.get(dtype).eps for dtype in difference.dtypes)
    except ValueError:
        return difference.differing == 0
    return difference.relative <= (eps if eps > FLOAT32 else UNITS * eps)
