"""What was asked for and is not there: dtypes, patterns, states, a resumed run's precision."""

from ._dtype_changed_on_resume import DtypeChangedOnResume as DtypeChangedOnResume
from ._dtype_not_asked import DtypeNotAsked as DtypeNotAsked
from ._pattern_empty import PatternEmpty as PatternEmpty
from ._state_mismatch import StateMismatch as StateMismatch
