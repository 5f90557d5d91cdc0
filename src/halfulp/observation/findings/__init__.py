"""What can be wrong with a run's numbers: one file per code, each a class that joins one list."""

from . import accumulators as accumulators
from . import comparisons as comparisons
from . import quantization as quantization
from . import ranges as ranges
from . import requests as requests
from . import scales as scales
from . import updates as updates
from ._kind import KINDS as KINDS
from ._kind import FindingKind as FindingKind
from ._kind import findings_of as findings_of
from ._kind import get_kind as get_kind
from ._kind import register_finding as register_finding
