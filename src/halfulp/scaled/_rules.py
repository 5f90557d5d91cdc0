"""All families of rules, imported so that they are registered."""

from . import _alignment as _alignment
from . import _bilinear as _bilinear
from . import _creation as _creation
from . import _gated as _gated
from . import _pass_through as _pass_through
from . import _reductions as _reductions
from . import _unit as _unit
from . import _writing as _writing
