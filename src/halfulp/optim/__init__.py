"""Optimizers that keep parameters and states in 16 and fewer bits: update rules x weight updates."""

from .. import _needs_torch as _needs_torch
from ._components import Components as Components
from ._ema import EMA as EMA
from ._feedback import Feedback as Feedback
from ._gradients import float32_gradients as float32_gradients
from ._kahan import Kahan as Kahan
from ._kahan import KahanStochastic as KahanStochastic
from ._meter import LostUpdateReport as LostUpdateReport
from ._optimizer import Optimizer as Optimizer
from ._optimizers import SGD as SGD
from ._optimizers import Adam as Adam
from ._optimizers import AdamW as AdamW
from ._optimizers import Lion as Lion
from ._rounded import Master as Master
from ._split import Split as Split
from ._states import State as State
from ._weight_update import WeightUpdate as WeightUpdate
from ._wrap import wrap as wrap
