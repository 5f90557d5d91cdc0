"""A user's training script, run unmodified: its model and optimizers are found while it runs."""

from ._find import FoundTraining as FoundTraining
from ._find import ScriptTraining as ScriptTraining
from ._find import find_model as find_model
from ._find import find_training as find_training
from ._find import tell_backward_losses as tell_backward_losses
from ._run import EXIT_TERMINATED as EXIT_TERMINATED
from ._run import PROCESS_REMEDY as PROCESS_REMEDY
from ._run import ScriptEnding as ScriptEnding
from ._run import exit_on_termination as exit_on_termination
from ._run import run_script as run_script
from ._watch import ScriptReport as ScriptReport
from ._watch import ScriptWatch as ScriptWatch
