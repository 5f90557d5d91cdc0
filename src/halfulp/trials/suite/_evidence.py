"""SuiteEvidence: what the suite found, with the papers' statements, as JSON, Markdown, a page and a figure."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any, ClassVar

from ...pages import write_whole
from .._defaults import REFERENCE
from ..evidence._evidence import SCHEMA, Evidence
from ._report import draw_figure, render_page, write_markdown
from ._statements import statements


@dataclasses.dataclass(frozen=True)
class SuiteEvidence(Evidence):
    """The results of `run_suite`: rows of every comparison, pairs left out and why, and the papers' statements.

    ``run`` has besides how it was run the ``suite``, the ``size``, ``left_out``: by task and recipe, why a pair has
    no trials; and ``failed``: the task, recipe, seed and error of each trial that raised.
    """

    stem: ClassVar[str] = "evidence"
    kind: ClassVar[str] = "suite"

    def tasks(self) -> list[str]:
        """Return the names of the tasks that have trials under float32: without one there is no gap."""
        heads = (record["settings"] for record in self.trials)
        return list(dict.fromkeys(head["task"]["name"] for head in heads if head["recipe"]["name"] == REFERENCE))

    def to_dict(self) -> dict[str, Any]:
        """Return plain data: each task's and recipe's settings once, and a curve's two ends."""
        shared: dict[str, dict[str, Any]] = {"tasks": {}, "recipes": {}}
        trials = []
        for record in self.trials:
            settings, result = record["settings"], dict(record["result"])
            task, recipe = settings["task"], settings["recipe"]
            shared["tasks"][task["name"]], shared["recipes"][recipe["name"]] = task, recipe
            result["curve"] = [result["curve"][0], result["curve"][-1]] if result["curve"] else []
            head = {"task": task["name"], "recipe": recipe["name"], "seed": settings["seed"]}
            trials.append({**head, "steps": settings["steps"], "result": result})
        versions = self.trials[0]["settings"]["versions"] if self.trials else {}
        return {
            "schema": SCHEMA,
            "run": self.run,
            "versions": versions,
            "statements": [dataclasses.asdict(one) for one in statements(self)],
            "rows": [dataclasses.asdict(row) for row in self.rows()],
            **shared,
            "suite trials": trials,
        }

    def to_json(self) -> str:
        """Return ``to_dict`` as JSON text without NaN or infinities, a trial a line."""
        whole = self.to_dict()
        parts = []
        for key, value in whole.items():
            if isinstance(value, list):
                lines = ",\n  ".join(json.dumps(one, allow_nan=False) for one in value)
                parts.append(f"{json.dumps(key)}: [\n  {lines}\n ]")
            else:
                parts.append(f"{json.dumps(key)}: {json.dumps(value, allow_nan=False)}")
        return "{\n " + ",\n ".join(parts) + "\n}\n"

    @classmethod
    def _read_trials(cls, data: dict[str, Any]) -> list[dict[str, Any]]:
        return [
            {
                "settings": {
                    "task": data["tasks"][one["task"]],
                    "recipe": data["recipes"][one["recipe"]],
                    "seed": one["seed"],
                    "steps": one["steps"],
                    "versions": data["versions"],
                },
                "result": one["result"],
            }
            for one in data["suite trials"]
        ]

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write one self-contained page, and beside it evidence.md and img/, the figure for light and for dark pages.

        Raises:
            ValueError: jinja2 or matplotlib is missing, or a file cannot be written.
        """
        place = Path(path)
        pictures = place.with_name("img")
        try:
            pictures.mkdir(exist_ok=True)
        except OSError as error:
            raise ValueError(f"cannot write {pictures}: {error.strerror or error}") from None
        for theme in ("light", "dark"):
            write_whole(pictures / f"{place.stem}-{theme}.svg", draw_figure(self, theme))
        write_whole(place.with_suffix(".md"), write_markdown(self))
        write_whole(place, render_page(self))
