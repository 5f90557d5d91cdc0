"""A user's training script, run unmodified: its model and optimizers are found while it runs."""

from ._find import Found as Found
from ._find import Training as Training
from ._find import find as find
from ._find import model_of as model_of
from ._find import tell_backward_losses as tell_backward_losses
from ._run import TERMINATED as TERMINATED
from ._run import Ending as Ending
from ._run import Termination as Termination
from ._run import run_script as run_script
from ._watch import Report as Report
from ._watch import Watch as Watch
