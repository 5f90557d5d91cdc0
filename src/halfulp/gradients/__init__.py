"""Gradients with exponents of their own: AdaptiveGradScaler, its policies and its two front ends."""

from .. import _needs_torch as _needs_torch
from ._controller import LastStep as LastStep
from ._one_scale import Constant as Constant
from ._one_scale import Dynamic as Dynamic
from ._one_scale import Measured as Measured
from ._one_scale import RisingFloor as RisingFloor
from ._policy import Amax as Amax
from ._policy import Policy as Policy
from ._published import AbsRange as AbsRange
from ._published import ElementWise as ElementWise
from ._published import UnderflowBound as UnderflowBound
from ._scaler import AdaptiveGradScaler as AdaptiveGradScaler
