"""Long sums that a narrow format stops: moments, running averages, gradients, residual streams, counts."""

from ._accumulation_swamped import AccumulationSwamped as AccumulationSwamped
from ._average_stuck import AverageStuck as AverageStuck
from ._positions_collide import PositionsCollide as PositionsCollide
from ._residual_swamped import ResidualSwamped as ResidualSwamped
from ._second_moment_stuck import SecondMomentStuck as SecondMomentStuck
