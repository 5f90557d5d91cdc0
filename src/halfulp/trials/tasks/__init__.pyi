"""The jobs that recipes are compared on, one file each."""

from ._registry import find_task_class as find_task_class
from ._registry import get as get
from ._registry import names as names
from ._registry import register as register
from ._task import Batch as Batch
from ._task import Data as Data
from ._task import Step as Step
from ._task import Task as Task
from ._task import compute_warm_cosine_factor as compute_warm_cosine_factor
