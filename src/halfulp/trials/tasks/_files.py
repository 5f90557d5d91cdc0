"""The files that tasks read, and messages on how to get those that are missing or broken."""

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from ..._messages import get_first_line_of_error
from ._task import Task

ContentType = TypeVar("ContentType")


@dataclasses.dataclass(frozen=True)
class TaskWithDataFiles(Task):
    """A task on a data set that lies in files; ``data`` is the folder that holds them, or one above it.

    Attributes:
        folder: What the data set is called, and the folder below ``data`` that may hold it.
        files: The files that are needed.
        how: How to get them, in a sentence.
    """

    data: str | None = None

    folder: ClassVar[str]
    files: ClassVar[tuple[str, ...]]
    how: ClassVar[str]

    def __post_init__(self) -> None:
        need = f"task {self.name!r} reads {' and '.join(self.files)}"
        from ._registry import find_task_class, has_data_folder_field, names

        free = [name for name in names() if not has_data_folder_field(find_task_class(name))]
        more = f"{self.how}. Tasks that need no files: {', '.join(free)}"
        if self.data is None:
            raise ValueError(f"{need}; give their folder with --data DIR (data= in Python). {more}")
        root = Path(self.data)
        for place in (root / self.folder, root):
            if all((place / name).is_file() for name in self.files):
                object.__setattr__(self, "data", str(place))
                return
        raise ValueError(f"{need}, but neither {root / self.folder} nor {root} holds them. {more}")


def import_sklearn() -> tuple[Any, Any, Any]:
    """Return scikit-learn's datasets, model_selection and preprocessing."""
    try:
        from sklearn import datasets, model_selection, preprocessing
    except ImportError:
        raise ValueError("this task reads scikit-learn's data: pip install 'halfulp[cli]'") from None
    return datasets, model_selection, preprocessing


def read_parquet(path: str | Path, columns: list[str], rows: int | None = None) -> list[list[Any]]:
    """Return columns of a Parquet file as lists, of the first ``rows`` or of all."""
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise ValueError(f"{path} is a Parquet file ({error}): pip install 'halfulp[cli]'") from None

    def read(columns: list[str]) -> Any:
        lacking = sorted(set(columns) - set(parquet.read_schema(path).names))
        if lacking:
            raise ValueError(f"it has no column {', '.join(lacking)}")
        return parquet.read_table(path, columns=columns)

    table = decode_file_content(str(path), read, columns)
    table = table.slice(0, rows) if rows else table
    return [table[column].to_pylist() for column in columns]


def decode_file_content(name: str, read: Callable[[Any], ContentType], content: Any) -> ContentType:
    """Return ``read(content)``; an error names the file, and the row of it."""
    try:
        return read(content)
    except Exception as error:
        line = re.sub(r" <[^>]* at 0x\w+>", "", get_first_line_of_error(error))
        raise ValueError(f"{name} is broken ({type(error).__name__}: {line}): get the file again") from None
