"""The environment that halfulp runs in: versions, processor, instructions, devices, cache; `halfulp env` prints it.

Nothing here needs torch, llvmlite or the command line's packages: what is missing or broken is said in its place.
"""

from ._describe import describe_cache as describe_cache
from ._describe import describe_environment as describe_environment
from ._describe import list_environment_lines as list_environment_lines
from ._processor import count_cores as count_cores
from ._processor import describe_processor as describe_processor
from ._processor import list_processor_instructions as list_processor_instructions
from ._processor import read_processor_name as read_processor_name
