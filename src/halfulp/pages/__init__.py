"""What all HTML pages share: a template to extend, its style sheet and script, tables, and files written whole."""

from ._page import MISSING_VALUE_TEXT as MISSING_VALUE_TEXT
from ._page import Cell as Cell
from ._page import Table as Table
from ._page import check_writable as check_writable
from ._page import format_count as format_count
from ._page import format_number as format_number
from ._page import format_share as format_share
from ._page import make_table as make_table
from ._page import render_template as render_template
from ._page import require_page_packages as require_page_packages
from ._page import write_file_atomically as write_file_atomically
