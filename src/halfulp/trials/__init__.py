"""Trials: tasks x recipes x seeds, and the evidence they give."""

from ._compare import compare as compare
from ._evidence import Evidence as Evidence
from ._plan import DEFAULT_RECIPES as DEFAULT_RECIPES
from ._plan import DEFAULT_TASKS as DEFAULT_TASKS
from ._pool import TrialError as TrialError
from ._row import Row as Row
