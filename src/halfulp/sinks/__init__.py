"""Where rows of numbers go while a run goes on: lines of JSON, loggers by duck type, functions."""

from ._sink import Outlet as Outlet
from ._sink import Row as Row
from ._sink import RowFile as RowFile
from ._sink import Sink as Sink
from ._sink import make_outlet as make_outlet
