"""Extensions: files and modules of a user's own that register formats, recipes, optimizers, policies and tasks."""

import importlib
import importlib.util
import os
import sys
from collections.abc import Iterable
from pathlib import Path

# Where worker processes, which begin with the library alone, find what to load.
EXTENSIONS_VARIABLE = "HALFULP_EXTENSIONS"


def load_extensions(extensions: Iterable[str]) -> None:
    """Import every extension, a path of a Python file or a module's name, here and in worker processes started here.

    Raises:
        ValueError: a file or module that is not there, a file that has the name of another module, or an error in it.
    """
    for extension in extensions:
        try:
            _load_extension(extension)
        except Exception as error:
            raise ValueError(f"extension {extension!r}: {type(error).__name__}: {error}") from error
        kept = [name for name in os.environ.get(EXTENSIONS_VARIABLE, "").split(os.pathsep) if name]
        name = str(Path(extension).resolve()) if extension.endswith(".py") else extension
        os.environ[EXTENSIONS_VARIABLE] = os.pathsep.join(dict.fromkeys([*kept, name]))


def load_inherited_extensions() -> None:
    """Import the extensions that the environment names, with which worker processes and commands begin."""
    load_extensions(name for name in os.environ.get(EXTENSIONS_VARIABLE, "").split(os.pathsep) if name)


def _load_extension(extension: str) -> None:
    if not extension.endswith(".py"):
        importlib.import_module(extension)
        return
    path = Path(extension).resolve()
    if not path.is_file():
        raise FileNotFoundError("no such file")
    there = sys.modules.get(path.stem)
    if there is not None:
        if Path(getattr(there, "__file__", None) or "").resolve() == path:
            return
        raise ImportError(f"a module {path.stem!r} is there already: give the file another name")
    specification = importlib.util.spec_from_file_location(path.stem, path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[path.stem] = module
    try:
        specification.loader.exec_module(module)
    except BaseException:
        del sys.modules[path.stem]
        raise
