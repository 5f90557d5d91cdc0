"""What can be wrong with a run's numbers: one class per code, in one file per subject, each of which joins one list."""

from . import _comparisons as _comparisons
from . import _ranges as _ranges
from . import _updates as _updates
from ._kind import FINDING_KINDS as FINDING_KINDS
from ._kind import FindingKind as FindingKind
from ._kind import collect_findings as collect_findings
from ._kind import get_finding_kind as get_finding_kind
from ._kind import register_finding as register_finding
