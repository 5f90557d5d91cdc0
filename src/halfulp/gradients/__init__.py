"""Gradients with exponents of their own: AdaptiveGradScaler, its policies and its two front ends."""

from .. import _needs_torch as _needs_torch
from ._narrow_reduction import NarrowAllReduceState as NarrowAllReduceState
from ._narrow_reduction import reduce_in_bfloat16 as reduce_in_bfloat16
from ._policy import Amax as Amax
from ._policy import Constant as Constant
from ._policy import Dynamic as Dynamic
from ._policy import Measured as Measured
from ._policy import Policy as Policy
from ._policy import RisingFloor as RisingFloor
from ._reports import LastStep as LastStep
from ._scaler import AdaptiveGradScaler as AdaptiveGradScaler
from ._underflow_bound import AbsRange as AbsRange
from ._underflow_bound import ElementWise as ElementWise
from ._underflow_bound import UnderflowBound as UnderflowBound
