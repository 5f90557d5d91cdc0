"""A user's training script, run unmodified: its model and optimizers are found while it runs."""

from ._run import CHILD_PROCESS_REMEDY as CHILD_PROCESS_REMEDY
from ._run import ScriptEnding as ScriptEnding
from ._run import report_termination as report_termination
from ._run import run_script as run_script
from ._watch import ScriptReport as ScriptReport
from ._watch import ScriptWatch as ScriptWatch
from ._watch import find_model as find_model
from ._watch import listen_to_backward_losses as listen_to_backward_losses
