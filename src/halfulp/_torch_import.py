"""Registration of halfulp's classes and operators with torch, once both are imported, in either order."""

import contextlib
import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from ._torch_floor import is_older

# The functions that files of torch.save name, under the names that the files hold; each checks what it is given.
REBUILD_FUNCTIONS_OF_SAVED_TENSORS = (
    "halfulp.mctensor._mctensor.rebuild_mctensor",
    "halfulp.scaled._scaled_tensor.rebuild_scaled_tensor",
    "halfulp.optim.weight_updates._weight_update.find_weight_update",
)
# The packages that define operators, halfulp::name, when they are imported.
SUBPACKAGES_DEFINING_OPERATORS = ("rounding", "arithmetic", "mctensor", "scaled", "gradients")
_operator_lookup_state = threading.local()


def call_after_import(name: str, call: Callable[[ModuleType], None]) -> None:
    """Call a function with a module: now, or as soon as somebody has imported it."""
    module = sys.modules.get(name)
    if module is None:
        sys.meta_path.insert(0, _ImportWatcher(name, call))
    else:
        call(module)


class _ImportWatcher:
    """A module finder that calls a function once one module has been imported."""

    def __init__(self, name: str, call: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._call = call

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self._name:
            return None
        others = [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
        spec = next((spec for finder in others if (spec := finder.find_spec(name, path, target))), None)
        if spec is None or spec.loader is None:
            return spec
        loader: Any = spec.loader  # which stays what it is: its method is another one for a single call
        execute = loader.exec_module

        def execute_and_call(module: ModuleType) -> None:
            del loader.exec_module
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                self._call(module)

        loader.exec_module = execute_and_call
        return spec


def register_with_torch(torch: ModuleType) -> None:
    """Let torch.load read halfulp's tensors and torch.ops.halfulp find its operators, unless torch is too old."""
    if is_older(torch.__version__):
        return
    torch.serialization.add_safe_globals(
        [(import_when_called(name), name) for name in REBUILD_FUNCTIONS_OF_SAVED_TENSORS]
    )
    torch.ops.halfulp = _make_operator_namespace(torch)


def import_when_called(name: str) -> Callable:
    """Return a function that imports the module of another function when it is called, and calls it."""

    def call(*arguments: Any) -> Any:
        module, _, function = name.rpartition(".")
        return getattr(importlib.import_module(module), function)(*arguments)

    return call


@contextlib.contextmanager
def suspend_imports_by_operator_lookup() -> Iterator[None]:
    """Return a context for defining operators, in which looking up an operator imports nothing."""
    _operator_lookup_state.defining = True
    try:
        yield
    finally:
        _operator_lookup_state.defining = False


def _make_operator_namespace(torch: ModuleType) -> Any:
    """Return the namespace torch.ops.halfulp, which imports what defines operators as a saved graph asks for one."""

    namespace: Any = torch._ops._OpNamespace

    class Operators(namespace):
        # Inductor pickles operators by the module that their namespace says: torch's own.
        __module__ = namespace.__module__

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                if getattr(_operator_lookup_state, "defining", False):
                    raise
                for package in SUBPACKAGES_DEFINING_OPERATORS:
                    importlib.import_module(f"halfulp.{package}")
                return super().__getattr__(name)

    return Operators("halfulp")
