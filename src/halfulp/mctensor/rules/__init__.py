"""All families of rules, imported so that they are registered."""

from .. import _decode as _decode
from ..entry import _composite_operators as _composite_operators
from .elementwise import _comparison as _comparison
from .elementwise import _pointwise as _pointwise
from .elementwise import _powers as _powers
from .memory import _collectives as _collectives
from .memory import _creation as _creation
from .memory import _data_movement as _data_movement
from .memory import _views as _views
from .networks import _attention as _attention
from .networks import _fused_optimizers as _fused_optimizers
from .networks import _interpolation as _interpolation
from .networks import _normalization as _normalization
from .networks import _pooling as _pooling
from .products import _convolution as _convolution
from .products import _linalg as _linalg
from .products import _products as _products
from .reductions import _index_add as _index_add
from .reductions import _order as _order
from .reductions import _reductions as _reductions
