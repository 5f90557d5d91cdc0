"""Optimizers that keep parameters and states in 16 and fewer bits: update rules x weight updates."""

from .. import _needs_torch as _needs_torch
from ._algorithms import SGD as SGD
from ._algorithms import Adafactor as Adafactor
from ._algorithms import Adagrad as Adagrad
from ._algorithms import Adam as Adam
from ._algorithms import AdamW as AdamW
from ._algorithms import Muon as Muon
from ._algorithms import NAdam as NAdam
from ._algorithms import RAdam as RAdam
from ._algorithms import RMSprop as RMSprop
from ._ema import EMA as EMA
from ._float32 import float32_gradients as float32_gradients
from ._gradient_release import GradientRelease as GradientRelease
from ._gradient_release import release_gradients as release_gradients
from ._halp import HALP as HALP
from ._lost_updates import LostUpdateReport as LostUpdateReport
from ._optimizer import OPTIMIZERS as OPTIMIZERS
from ._optimizer import Optimizer as Optimizer
from ._optimizer import register_optimizer as register_optimizer
from ._optimizer import report as report
from ._published_algorithms import LAMB as LAMB
from ._published_algorithms import AdamWScheduleFree as AdamWScheduleFree
from ._published_algorithms import Adan as Adan
from ._published_algorithms import AdEMAMix as AdEMAMix
from ._published_algorithms import Lion as Lion
from ._published_algorithms import Prodigy as Prodigy
from ._published_algorithms import SGDScheduleFree as SGDScheduleFree
from ._wrap import wrap as wrap
from .rules._update_rule import Reduction as Reduction
from .rules._update_rule import StateSlot as StateSlot
from .rules._update_rule import UpdateRule as UpdateRule
from .states._state import State as State
from .states._state import register_state_store as register_state_store
from .weight_updates._components import Components as Components
from .weight_updates._components import Kahan as Kahan
from .weight_updates._components import KahanStochastic as KahanStochastic
from .weight_updates._rounding import Feedback as Feedback
from .weight_updates._rounding import Master as Master
from .weight_updates._split import Split as Split
from .weight_updates._weight_update import WeightUpdate as WeightUpdate
from .weight_updates._weight_update import register_weight_update as register_weight_update


def __getattr__(name: str) -> object:
    # What a configuration spells wrongly ("halfulp.optim.AdamV") is looked up here.
    from .._names import describe_unknown_name

    raise AttributeError(describe_unknown_name("name in halfulp.optim", name, OPTIMIZERS))
