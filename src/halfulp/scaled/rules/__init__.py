"""Rules of scaled tensors, by family, and the vocabulary that says a rule in one line."""

from ...subclass._derivation import list_functional_overloads as list_functional_overloads
from .. import _float8 as _float8
from .. import _write as _write
from .._registry import Family as Family
from .._registry import register_family as register_family
from . import _aligned as _aligned
from . import _collectives as _collectives
from . import _data_movement as _data_movement
from . import _elementwise as _elementwise
from . import _layers as _layers
from . import _products as _products
from . import _reductions as _reductions
from . import _tables as _tables
from ._vocabulary import aligned as aligned
from ._vocabulary import data_movement as data_movement
from ._vocabulary import decoded as decoded
from ._vocabulary import gated_activation as gated_activation
from ._vocabulary import homogeneous as homogeneous
from ._vocabulary import measured_scale as measured_scale
from ._vocabulary import unit_scale as unit_scale
