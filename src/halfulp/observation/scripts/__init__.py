"""A user's training script, run unmodified: its model and optimizers are found while it runs."""

from ._watch import CHILD_PROCESS_REMEDY as CHILD_PROCESS_REMEDY
from ._watch import ScriptEnding as ScriptEnding
from ._watch import ScriptWatch as ScriptWatch
from ._watch import find_outermost_module_of_parameters as find_outermost_module_of_parameters
from ._watch import listen_to_backward_losses as listen_to_backward_losses
from ._watch import report_and_exit_on_sigterm as report_and_exit_on_sigterm
from ._watch import run_script as run_script
