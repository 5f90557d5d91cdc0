"""Numbers that leave a format's range: underflow, overflow, an eps of zero, NaN and infinities."""

from ._activation_underflow import ActivationUnderflow as ActivationUnderflow
from ._eps_zero import EpsZero as EpsZero
from ._first_nonfinite import FirstNonfinite as FirstNonfinite
from ._gradient_underflow import GradientUnderflow as GradientUnderflow
from ._overflow_near import OverflowNear as OverflowNear
