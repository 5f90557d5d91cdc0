"""Train in 16, 8 and fewer bits with 32-bit accuracy, and see why it works."""

import lazy_loader

from . import _torch_floor, _torch_import

__version__ = "0.1.0"

# The names stand in __init__.pyi, and each is imported when it is first used: torch too.
_find_lazily, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> object:
    # What a configuration spells wrongly ("halfulp.AdamV") is looked up here.
    if name not in __all__ and not name.startswith("_"):
        from ._names import unknown

        raise AttributeError(unknown("name in halfulp", name, __all__))
    return _find_lazily(name)


_torch_floor.check_torch_version()
_torch_import.call_after_import("torch", _torch_import.register_with_torch)
