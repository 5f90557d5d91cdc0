"""Long sums that a narrow format stops: moments, running averages, accumulated gradients."""

from ._accumulation_swamped import AccumulationSwamped as AccumulationSwamped
from ._average_stuck import AverageStuck as AverageStuck
from ._second_moment_stuck import SecondMomentStuck as SecondMomentStuck
