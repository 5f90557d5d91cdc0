"""The papers' suite: their kinds of tasks under every recipe, their figures and findings beside ours."""

from ._evidence import SuiteEvidence as SuiteEvidence
from ._run import run_suite as run_suite
from ._statements import Statement as Statement
from ._statements import statements as statements
