"""What can be wrong with a run's numbers: one file per code, each a class that joins one list."""

from . import _never_stepped as _never_stepped
from ._kind import KINDS as KINDS
from ._kind import FindingKind as FindingKind
from ._kind import findings_of as findings_of
from ._kind import get_kind as get_kind
from ._kind import register_finding as register_finding
