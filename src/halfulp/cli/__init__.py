"""The command line: halfulp compare | tune | verify | observe | audit | forecast | formats | recipes | tasks | ..."""

from ._app import application as application
from ._app import main as main
