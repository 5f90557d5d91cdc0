"""All families of rules, imported so that they are registered."""

from .. import _before_autograd as _before_autograd
from . import _comparison as _comparison
from . import _memory as _memory
from . import _pointwise as _pointwise
from . import _products as _products
from . import _reductions as _reductions
