"""The HTML pages' common ground: one template to extend, its style sheet and script, and writing a file whole."""

from ._file import check_writable as check_writable
from ._file import write_whole as write_whole
from ._render import render as render
from ._render import require as require
