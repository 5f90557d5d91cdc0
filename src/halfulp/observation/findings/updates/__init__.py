"""What becomes of weight updates: lost, frozen, biased, or never asked for."""

from ._freeze_ahead import FreezeAhead as FreezeAhead
from ._never_stepped import NeverStepped as NeverStepped
from ._random_bits_repeat import RandomBitsRepeat as RandomBitsRepeat
from ._updates_lost import UpdatesLost as UpdatesLost
from ._weight_decay_lost import WeightDecayLost as WeightDecayLost
from ._weight_frozen import WeightFrozen as WeightFrozen
