"""The environment that halfulp runs in: versions, processor, instructions, devices, cache; `halfulp env` prints it.

Nothing here needs torch, llvmlite or the command line's packages: what is missing or broken is said in its place.
"""

from ._describe import describe as describe
from ._describe import describe_cache as describe_cache
from ._describe import lines as lines
from ._processor import core_count as core_count
from ._processor import instructions as instructions
from ._processor import processor_line as processor_line
from ._processor import processor_name as processor_name
