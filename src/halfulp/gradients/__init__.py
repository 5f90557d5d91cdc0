"""Gradients with exponents of their own: AdaptiveGradScaler, its policies and its two front ends."""

from .. import _needs_torch as _needs_torch
from ._narrow_reduction import NarrowReduction as NarrowReduction
from ._narrow_reduction import reduce_in_bfloat16 as reduce_in_bfloat16
from ._reports import LastStep as LastStep
from ._scaler import AdaptiveGradScaler as AdaptiveGradScaler
from .policies._policy import Amax as Amax
from .policies._policy import Constant as Constant
from .policies._policy import Dynamic as Dynamic
from .policies._policy import Measured as Measured
from .policies._policy import Policy as Policy
from .policies._policy import RisingFloor as RisingFloor
from .policies._underflow_bound import AbsRange as AbsRange
from .policies._underflow_bound import ElementWise as ElementWise
from .policies._underflow_bound import UnderflowBound as UnderflowBound
