"""Writes docs/benchmarks.md from the JSON files in results/: `python -m benchmarks.tables`."""

import json
import sys

from ._results import FOLDER, Result, Table, load

PAGE = FOLDER.parent.parent / "docs" / "benchmarks.md"
ORDER = (
    "claims",
    "quantize",
    "adamw",
    "small_updates",
    "states",
    "running_maximum",
    "forecast",
    "overhead",
    "exhaustive",
    "peers",
    "accuracy",
    "mctensor",
    "mctensor_experiments",
    "mctensor_operators",
    "mctensor_values",
    "hilbert",
    "mammals",
    "processes",
)
HEAD = """# Benchmarks

Every figure on this page comes from a file in `benchmarks/results/`, which a script in `benchmarks/` wrote; \
`python -m benchmarks.tables` makes the page. To measure again: `python -m benchmarks.peers` builds an environment \
that holds the peers, and `benchmarks/.peers/bin/python -m benchmarks` runs everything.

How speed is measured: contenders take turns in one process, but for peers that \
need an environment of their own and run there beside the same reference; a figure is the median over at least 7 \
rounds of the ratio to a named peer that ran just before and just after, whose own time stands beside it. A round in \
which the process had less than 0.9 x threads x wall time of CPU (half of wall time for one thread, whose time is CPU \
time), or in which the peer took more than 1.1 x what its fastest tenth took, was disturbed by something else: it is \
dropped, and counted. \
Where a table speaks of processes, the whole measurement was made in that many fresh processes, and the range is over \
them: a bar counts as met when that range reaches it.

On a GPU: `python -m benchmarks gpu` needs the repository, torch and the packages that halfulp imports, is done within \
nine minutes on one H200, and writes `results/gpu.json` part by part: the tests marked `cuda`, bits beside the \
reference on the CPU, AdamW steps beside torch's, memory, synchronisations, trainings. What fails is printed first, \
and costs no other part. `--dry-run` tries all of it at tiny sizes on a CPU, with Triton's interpreter where triton is \
installed.
"""


def grid(table: Table) -> str:
    """One table in Markdown."""
    heads = [column.replace("|", "\\|") for column in table.columns]
    lines = ["| " + " | ".join(heads) + " |", "|" + " --- |" * len(table.columns)]
    for row in table.rows:
        cells = [table.text(row, column).replace("|", "\\|") for column in table.columns]
        if row.get("met") is False and cells:
            cells = [f"**{cell}**" if cell else "" for cell in cells]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def section(result: Result) -> str:
    """One benchmark: its text, its tables, its machine and its command."""
    parts = [f"## {result.title}", result.text]
    for table in result.tables:
        parts += [f"### {table.title}", grid(table)]
        if table.note:
            parts.append(table.note)
    facts = ", ".join(f"{name} {value}" for name, value in result.machine.items())
    parts.append(f"Measured by `{result.command}`: {facts}.")
    return "\n\n".join(parts)


def bars(results: list[Result]) -> str:
    """The count of bars met, and every bar that was missed."""
    rows = [(result, table, row) for result in results for table in result.tables for row in table.rows]
    judged = [(result, table, row) for result, table, row in rows if row.get("met") is not None]
    missed = [item for item in judged if not item[2]["met"]]
    lines = ["## Bars", f"{len(judged) - len(missed)} of {len(judged)} bars are met."]
    if missed:
        lines.append("Missed (in bold below):")
        lines.append(
            "\n".join(
                f"- {table.title}: " + ", ".join(filter(None, (table.text(row, name) for name in table.columns)))
                for _, table, row in missed
            )
        )
    return "\n\n".join(lines)


def rank(result: Result) -> tuple[int, str]:
    """The order on the page."""
    return (ORDER.index(result.name) if result.name in ORDER else len(ORDER), result.name)


def page() -> str:
    """The whole page."""
    files = [path for path in FOLDER.glob("*.json") if "tables" in json.loads(path.read_text())]
    results = sorted(map(load, files), key=rank)
    return "\n\n".join([HEAD.rstrip(), bars(results), *map(section, results)]) + "\n"


def main() -> None:
    """Writes the page; with --check, exits 1 when the page on disk is another."""
    text = page()
    if "--check" in sys.argv[1:]:
        sys.exit(0 if PAGE.exists() and PAGE.read_text() == text else 1)
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(text)


if __name__ == "__main__":
    main()
