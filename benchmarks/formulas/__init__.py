"""Formulas that public training code writes by hand: the registry, filled from files by their kind."""

from . import _classes as _classes
from . import _generation as _generation
from . import _layers as _layers
from . import _metrics as _metrics
from . import _policies as _policies
from . import _regression as _regression
from . import _sequences as _sequences
from ._registry import FORMULAS as FORMULAS
from ._registry import Formula as Formula
