"""The command line: halfulp compare | tune | verify | observe | audit | forecast | formats | recipes | tasks | ..."""

from ._app import main as main
from ._app import make_application as make_application
