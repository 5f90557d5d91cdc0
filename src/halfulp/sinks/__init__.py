"""Where rows of numbers go while a run goes on: lines of JSON, loggers by duck type, functions."""

from ._sink import GuardedSink as GuardedSink
from ._sink import JsonLinesFile as JsonLinesFile
from ._sink import Row as Row
from ._sink import Sink as Sink
from ._sink import make_guarded_sink as make_guarded_sink
