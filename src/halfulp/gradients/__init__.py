"""Gradients with exponents of their own: AdaptiveGradScaler, its policies and its two front ends."""

from .. import _needs_torch as _needs_torch
from ._scaler import AdaptiveGradScaler as AdaptiveGradScaler
from .policies._policy import Amax as Amax
from .policies._policy import Policy as Policy
from .policies._single_scale import Constant as Constant
from .policies._single_scale import Dynamic as Dynamic
from .policies._single_scale import Measured as Measured
from .policies._single_scale import RisingFloor as RisingFloor
from .policies._underflow_bound import AbsRange as AbsRange
from .policies._underflow_bound import ElementWise as ElementWise
from .policies._underflow_bound import UnderflowBound as UnderflowBound
from .reports._last_step import LastStep as LastStep
