"""Finding a task's files under the folder given by --data."""

from pathlib import Path


def find(task: str, data: str | None, names: tuple[str, ...], how: str) -> Path:
    """The folder that holds all of ``names``: ``data`` itself or its subfolder named like the task.

    Raises:
        ValueError: no folder was given, or files are missing; the message says how to get them.
    """
    need = f"task {task!r} reads {' and '.join(names)}"
    if data is None:
        raise ValueError(f"{need}; give their folder with --data DIR (data= in Python). {how}")
    root = Path(data)
    for folder in (root / task, root):
        if all((folder / name).is_file() for name in names):
            return folder.resolve()
    raise ValueError(f"{need}, but neither {root / task} nor {root} holds them. {how}")
