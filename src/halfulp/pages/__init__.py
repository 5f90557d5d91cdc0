"""The HTML pages' common ground: one template to extend, its style sheet and script, and writing a file whole."""

from ._file import check_writable as check_writable
from ._file import write_whole as write_whole
from ._render import render as render
from ._render import require as require
from ._table import DASH as DASH
from ._table import Cell as Cell
from ._table import Column as Column
from ._table import Table as Table
from ._table import count as count
from ._table import number as number
from ._table import share as share
