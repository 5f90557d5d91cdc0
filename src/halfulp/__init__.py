"""Train in 16, 8 and fewer bits with 32-bit accuracy, and see why it works."""

import lazy_loader

from . import _torch_floor, _torch_import

__version__ = "0.1.0"

# The names stand in __init__.pyi, and each is imported when it is first used: torch too.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

_torch_floor.check()
_torch_import.register_with_torch()
