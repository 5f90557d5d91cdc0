"""All families of rules, imported so that they are registered."""

from . import _accumulation as _accumulation
from . import _activations as _activations
from . import _attention as _attention
from . import _collectives as _collectives
from . import _comparison as _comparison
from . import _composite_operators as _composite_operators
from . import _convolution as _convolution
from . import _creation as _creation
from . import _decoding as _decoding
from . import _exact as _exact
from . import _functional_collectives as _functional_collectives
from . import _fused_optimizers as _fused_optimizers
from . import _grouped as _grouped
from . import _interpolation as _interpolation
from . import _linalg as _linalg
from . import _moves as _moves
from . import _normalization as _normalization
from . import _order as _order
from . import _pointwise as _pointwise
from . import _pooling as _pooling
from . import _powers as _powers
from . import _products as _products
from . import _reductions as _reductions
from . import _views as _views
