"""The output folder: finished trials, each written whole or not at all, and the resuming of a broken run."""

import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...pages import write_file_atomically
from ..evidence._row import check_trial_record
from ._plan import Trial


class TrialStore:
    """The folder of one comparison: ``trials/<key>.json`` per finished trial, then a page and a JSON file."""

    def __init__(self, out: str | os.PathLike[str]):
        self.root = Path(out)
        self.trials_folder = self.root / "trials"
        self.json_path = self.root / "compare.json"
        self.page_path = self.root / "compare.html"
        try:
            self.trials_folder.mkdir(parents=True, exist_ok=True)
            for folder in (self.root, self.trials_folder):
                with tempfile.TemporaryFile(dir=folder):
                    pass
        except OSError as error:
            raise ValueError(
                f"cannot write into the output folder {self.root}: {error.strerror or error}; give another with --out"
            ) from None

    def refuse_or_delete_old_results(self, resume: bool, overwrite: bool = False) -> None:
        """Start the comparison, resume or overwrite that of the folder."""
        if resume and overwrite:
            raise ValueError("--resume keeps the finished trials of a folder and --overwrite deletes them: give one")
        paths = (self.json_path, self.page_path, *sorted(self.trials_folder.glob("*.json")))
        found = [path for path in paths if path.exists()]
        if found and not (resume or overwrite):
            count = sum(path.parent == self.trials_folder for path in found)
            state = "a comparison" if self.json_path.exists() else "an interrupted comparison"
            raise ValueError(
                f"{self.root} holds {state} of {count} finished trials: --resume takes over those of the same "
                "settings and trains what is missing, --overwrite deletes them, --out names another folder"
            )
        for path in found if overwrite else ():
            path.unlink()

    def read_finished_results(self, trials: Sequence[Trial]) -> dict[str, dict[str, Any]]:
        """Return the results that the folder has of some trials, by key."""
        results = {}
        for trial in trials:
            path = self.trials_folder / f"{trial.key}.json"
            if path.exists():
                results[trial.key] = _read_matching_result(path, trial)
        return results

    def write_trial(self, trial: Trial, result: dict[str, Any]) -> None:
        """Write one finished trial; a report of those before is not whole any more.

        Raises:
            ValueError: another comparison has written this trial meanwhile, or the file cannot be written.
        """
        path = self.trials_folder / f"{trial.key}.json"
        if path.exists():  # it was not there when this comparison began
            raise ValueError(f"another comparison writes into {self.root} meanwhile: give each a folder with --out")
        for report in (self.json_path, self.page_path):
            report.unlink(missing_ok=True)
        record = {"settings": trial.settings(), "result": result}
        write_file_atomically(path, json.dumps(record, indent=1, allow_nan=False))


def _read_matching_result(path: Path, trial: Trial) -> dict[str, Any]:
    """Return a finished trial's result; refuse a file that is none, or of other settings."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        settings, result = dict(record["settings"]), record["result"]
        wanted = json.loads(json.dumps(trial.settings()))
        if settings == wanted:
            check_trial_record(record)
            return result
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a finished trial ({error}); delete it and resume again") from None
    had, has = (
        {
            f"{part}.{key}".strip("."): value
            for part, content in one.items()
            for key, value in (content.items() if isinstance(content, dict) else [("", content)])
        }
        for one in (settings, wanted)
    )
    where = next(key for key in {**had, **has} if had.get(key) != has.get(key))
    raise ValueError(
        f"cannot resume: {path} was trained with {where} = {had.get(where)!r}, this run has {has.get(where)!r}; use "
        "the same settings or another folder with --out"
    )
