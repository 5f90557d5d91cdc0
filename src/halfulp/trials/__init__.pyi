"""Trials: tasks x recipes x seeds, and the evidence they give."""

from . import tasks as tasks
from ._compare import compare as compare
from ._defaults import DEFAULT_RECIPES as DEFAULT_RECIPES
from ._defaults import DEFAULT_TASKS as DEFAULT_TASKS
from ._tune import Candidate as Candidate
from ._tune import Tuned as Tuned
from ._tune import tune as tune
from .evidence._evidence import Evidence as Evidence
from .evidence._row import Row as Row
from .running._pool import TrialError as TrialError
