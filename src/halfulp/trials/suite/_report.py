"""What the papers' suite found: sections as Markdown or a page, one figure of all gaps, and JSON."""

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from ...pages import render, require, write_whole
from .._defaults import REFERENCE, TONES
from ..evidence._evidence import SCHEMA, Evidence
from ..evidence._row import FinishedTrials, Row
from ..evidence._table import format_cells, loss_name, write_notes
from ..page._curves import SVG_SETTINGS, write_svg
from ..running._progress import describe_duration
from ._statements import COMMON, CONFIRMED, REFUTED, REPORTED, TASKS, explain_loss, statements

TITLE = "The papers’ tables, every recipe side by side"


@dataclasses.dataclass(frozen=True)
class Section:
    """A section of the report: a heading, sentences, and perhaps a table of text with notes."""

    title: str
    said: Sequence[str] = ()
    headers: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    notes: Sequence[str] = ()


def list_sections(evidence: FinishedTrials) -> list[Section]:
    """Return the sections of the report, in order."""
    findings = [[one.claim, one.source, one.verdict, one.numbers] for one in statements(evidence)]
    sections = [
        _describe_run(evidence),
        Section("The papers’ findings", (), ("statement", "paper", "verdict", "numbers"), findings),
        *(_describe_task(evidence, task) for task in evidence.tasks()),
    ]
    if evidence.run.get("failed"):
        said = ["The command ended with an error because of these; a row above counts the seeds that finished."]
        headers = ("task", "recipe", "seeds", "why")
        sections.append(Section("Trials that failed, and why", said, headers, group_failures(evidence)))
    left_out = [
        [task, ", ".join(recipe for recipe, said in of_task.items() if said == why), why]
        for task, of_task in evidence.run.get("left_out", {}).items()
        for why in dict.fromkeys(of_task.values())
    ]
    return [*sections, Section("Pairs that were not run, and why", (), ("task", "recipes", "why"), left_out)]


def _describe_run(evidence: FinishedTrials) -> Section:
    run = evidence.run
    recipes = {record["settings"]["recipe"]["name"] for record in evidence.trials}
    seeds = {record["settings"]["seed"] for record in evidence.trials}
    seeds_said = f"{len(seeds)} seed{'' if len(seeds) == 1 else 's'}"
    said = [
        f"{len(evidence.tasks())} tasks, {len(recipes)} recipes, {seeds_said}, {len(evidence.trials)} trials of size "
        f"“{run['size']}”, {_describe_cost(evidence)}.",
        "Every row of a task starts from the same float32 weights, sees the same batches and uses the same "
        "hyper-parameters. Gaps are paired by seed; verdicts are corrected for the number of recipes on the task.",
        "What a paper reports is on its own application and quoted from a text that was read; figures that could not "
        "be checked against one are left out.",
    ]
    if len(seeds) < 3:
        few = f"{seeds_said} {'is' if len(seeds) == 1 else 'are'} too few"
        said.append(f"{few} for a spread that decides: a verdict needs three.")
    return Section("How it was run", said)


def _describe_cost(evidence: FinishedTrials) -> str:
    """Return how much CPU time the training took, and how long by the clock, resumed runs included."""
    results = [record["result"] for record in evidence.trials]
    steps = [record["settings"]["steps"] for record in evidence.trials]
    seconds = sum(result["step_ms"] / 1000 * count for result, count in zip(results, steps))
    steps_took = (
        f"about {describe_duration(seconds)} of training steps on one thread each of {evidence.run['processor']}"
    )
    pieces = evidence.run.get("pieces", [])
    if not pieces:
        return steps_took
    whole = "one run" if len(pieces) == 1 else f"{len(pieces)} runs, one resuming the other"
    return f"{steps_took}; {describe_duration(sum(pieces))} by the clock, in {whole}"


def _describe_task(evidence: FinishedTrials, task: str) -> Section:
    loss = loss_name(evidence, task)
    shown = (loss, "gap to fp32", "verdict", "accuracy", "movement kept", "bytes/param", "step time")
    rows = []
    for row in evidence.rows(task):
        words = format_cells(evidence, row)
        found = (record["result"]["diverged_at"] for record in evidence.of_recipe(task, row.recipe))
        steps = [str(step) for step in found if step is not None]
        if row.diverged and steps:
            words["verdict"] += f" at step {', '.join(steps)}"
        paper = REPORTED.get(row.recipe)
        reported = f"{paper.says} ({paper.source})" if paper else "–"
        rows.append([row.recipe, *(words[name] for name in shown), reported, _describe_disagreement(row)])
    title = evidence.of_task(task)[0]["settings"]["task"]["title"]
    headers = ("recipe", *shown, "its paper, on its own application", "where ours disagrees")
    return Section(f"{task}: {title}", (), headers, rows, write_notes(evidence, task))


def _describe_disagreement(row: Row) -> str:
    """Describe how our verdict differs from the paper's, and the reading that best explains it."""
    paper = REPORTED.get(row.recipe)
    if paper is None or row.verdict in (None, "unclear", paper.expects):
        return ""
    if row.verdict == "better":
        return "" if paper.expects == "no difference" else "better here"
    lost = row.verdict in ("worse", "diverged")
    if lost == (paper.expects == "worse"):
        return ""
    if lost:
        return f"{row.verdict} here; {explain_loss(row)}"
    return f"no loss here; {_explain_no_loss(row)}"


def _explain_no_loss(row: Row) -> str:
    if row.underflow is not None:
        return f"{100 * row.underflow:.1f}% of the gradient elements underflow on this task"
    if row.realised is not None:
        return f"the updates are large enough here: {100 * row.realised:.0f}% of the movement is kept"
    return "the task is smaller than the paper's"


def group_failures(evidence: FinishedTrials) -> list[tuple[str, str, str, str]]:
    """Return task, recipe, seeds and error of failed trials, those of one error in one line."""
    seeds: dict[tuple[str, str, str], list[str]] = {}
    for one in evidence.run.get("failed", []):
        seeds.setdefault((one["task"], one["recipe"], one["why"]), []).append(str(one["seed"]))
    return [(task, recipe, ", ".join(of_seeds), why) for (task, recipe, why), of_seeds in seeds.items()]


def write_markdown(evidence: FinishedTrials) -> str:
    """Return the report as one Markdown file."""
    run = evidence.run
    command = f"halfulp compare --suite {run['suite']} --size {run['size']}"
    written = f"This page is written by `{command} --data DIR --out DIR`."
    return "\n\n".join([f"# {TITLE}", written, _PICTURE, write_sections(evidence)]) + "\n"


def write_sections(evidence: FinishedTrials) -> str:
    """Return the sections alone, for a page with a head of its own."""
    parts = []
    for section in list_sections(evidence):
        parts += [f"## {section.title}", *section.said]
        if section.rows:
            lines = [section.headers, ["---"] * len(section.headers), *section.rows]
            escaped = (" | ".join(cell.replace("|", "\\|") for cell in line) for line in lines)
            parts.append("\n".join(f"| {line} |" for line in escaped))
        parts.append("\n".join(f"- {note}" for note in section.notes))
    return "\n\n".join(filter(None, parts))


_PICTURE = """<picture>
<source media="(prefers-color-scheme: dark)" srcset="img/evidence-dark.svg">
<img alt="Gap to float32 by recipe and task, with the spread over seeds" src="img/evidence-light.svg">
</picture>"""


def render_page(evidence: FinishedTrials) -> str:
    """Return the report as one self-contained page."""
    require("matplotlib", instead="give no out folder")
    return render(
        "halfulp.trials.page",
        "evidence.html.j2",
        title=TITLE,
        sections=list_sections(evidence),
        light=draw_figure(evidence, "light"),
        dark=draw_figure(evidence, "dark"),
        tones={CONFIRMED: "good", REFUTED: "bad", **TONES},
    )


_THEMES = {
    "light": {"ink": "#1f2328", "faint": "#d1d9e0", "bad": "#c4320a", "good": "#067647", "open": "#6b7280"},
    "dark": {"ink": "#e6edf3", "faint": "#3d444d", "bad": "#ff8a65", "good": "#4fd18b", "open": "#9aa4af"},
}
_LINEAR, _REACH = 1.0, 100.0  # per cent of float32's loss: linear up to, and where the axis ends


def draw_figure(evidence: FinishedTrials, theme: str) -> str:
    """Return an SVG of each recipe's gap to float32 on each task, with its spread over seeds, for light or dark pages.

    The axis is in per cent of float32's loss, linear up to 1%, logarithmic up to 100%; a cross is a divergence.
    """
    require("matplotlib", instead="give no out folder")
    if theme not in _THEMES:
        raise ValueError(f"a theme is light or dark, got {theme!r}")
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    colours = _THEMES[theme]
    common = [recipe if isinstance(recipe, str) else recipe.name for recipe in COMMON]
    found = dict.fromkeys(record["settings"]["recipe"]["name"] for record in evidence.trials)
    # Those of all tasks come first.
    names = [name for name in dict.fromkeys([*common, *found]) if name in found and name != REFERENCE]
    tasks = [task for task in TASKS if task in evidence.tasks()]
    with rc_context(SVG_SETTINGS):
        drawn = Figure(figsize=(1.6 + 1.05 * len(tasks), 0.9 + 0.19 * len(names)), layout="constrained")
        FigureCanvasSVG(drawn)
        drawn.patch.set_alpha(0)
        panels = drawn.subplots(1, len(tasks), sharey=True, squeeze=False)[0]
        for axes, task in zip(panels, tasks):
            _draw_task(axes, {row.recipe: row for row in evidence.rows(task)}, names, colours)
            axes.set_title(task.replace("-", "-\n", 1), fontsize=8, color=colours["ink"])
        panels[0].set_yticks(range(len(names)), names, color=colours["ink"], fontsize=8)
        panels[0].invert_yaxis()
        drawn.supxlabel("gap to float32, % of its loss", fontsize=8, color=colours["ink"])
        return write_svg(drawn)


def _draw_task(axes: Any, rows: dict[str, Row], names: Sequence[str], colours: dict[str, str]) -> None:
    axes.patch.set_alpha(0)
    axes.set_xscale("symlog", linthresh=_LINEAR)
    axes.set_xlim(-_REACH, 1.6 * _REACH)
    axes.set_xticks([-10, -1, 0, 1, 10, 100], ["−10", "", "0", "", "10", ""])
    axes.tick_params(colors=colours["ink"], length=0, labelsize=7)
    axes.minorticks_off()
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(colours["faint"])
    axes.axvline(0, color=colours["ink"], linewidth=0.8)
    axes.set_axisbelow(True)
    axes.grid(axis="y", color=colours["faint"], linewidth=0.5)
    reference = rows["fp32"].loss
    for place, name in enumerate(names):
        row = rows.get(name)
        if row is None:
            continue
        tone = TONES.get(row.verdict or "", "open")
        if row.diverged or row.gap is None or not reference:
            axes.plot([1.3 * _REACH], [place], marker="x", color=colours["bad"], markersize=5)
            continue
        gap, spread = (100 * value / abs(reference) for value in (row.gap, row.gap_spread or 0.0))
        shown = min(max(gap, -_REACH), _REACH)
        axes.plot(
            [max(gap - spread, -_REACH), min(gap + spread, _REACH)], [place] * 2, color=colours[tone], linewidth=1.4
        )
        marker = "o" if abs(gap) <= _REACH else ">" if gap > 0 else "<"
        axes.plot([shown], [place], marker=marker, color=colours[tone], markersize=4, clip_on=False)


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
        """Write one self-contained page, and beside it evidence.md and img/, the figure for light and dark pages."""
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
