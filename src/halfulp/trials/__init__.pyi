"""Trials: tasks x recipes x seeds, and the evidence they give."""

from . import tasks as tasks
from ._compare import compare as compare
from ._defaults import DEFAULT_RECIPES as DEFAULT_RECIPES
from ._defaults import DEFAULT_TASKS as DEFAULT_TASKS
from .evidence._evidence import Evidence as Evidence
from .evidence._row import Row as Row
from .running._pool import TrialError as TrialError
from .tuning._candidates import Candidate as Candidate
from .tuning._tune import Tuned as Tuned
from .tuning._tune import tune as tune
