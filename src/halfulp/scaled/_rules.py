"""All families of rules, imported so that they are registered."""

from . import _alignment as _alignment
from . import _attention as _attention
from . import _bilinear as _bilinear
from . import _collectives as _collectives
from . import _comparison as _comparison
from . import _convolution as _convolution
from . import _creation as _creation
from . import _eight_bits as _eight_bits
from . import _foreach as _foreach
from . import _fourier as _fourier
from . import _functional_collectives as _functional_collectives
from . import _gated as _gated
from . import _indexing as _indexing
from . import _linear_algebra as _linear_algebra
from . import _losses as _losses
from . import _norms as _norms
from . import _order as _order
from . import _pass_through as _pass_through
from . import _pooling as _pooling
from . import _power_laws as _power_laws
from . import _recurrent as _recurrent
from . import _random as _random
from . import _reductions as _reductions
from . import _special as _special
from . import _unit as _unit
from . import _writing as _writing
