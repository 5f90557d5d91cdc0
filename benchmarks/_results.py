"""Results as data: tables with bars, kept as JSON in results/ and printed for a person."""

import json
import platform
import subprocess
from dataclasses import asdict, dataclass, field
from pathlib import Path

FOLDER = Path(__file__).resolve().parent / "results"


@dataclass
class Table:
    """Rows under named columns; a column's format is a Python format specification or ''.

    A row may carry "bar" (the bar in words) and "met" (True, False, or None where no bar applies).
    """

    title: str
    columns: dict[str, str]
    rows: list[dict] = field(default_factory=list)
    note: str = ""

    def add(self, **cells) -> None:
        """Adds one row."""
        self.rows.append(cells)

    def text(self, row: dict, column: str) -> str:
        """One cell as it is printed."""
        value = row.get(column)
        if value is None:
            return ""
        if isinstance(value, bool):
            return "yes" if value else "NO"
        if isinstance(value, str) or not self.columns[column]:
            return str(value)
        return format(value, self.columns[column])


@dataclass
class Result:
    """What one benchmark found, and on which machine."""

    name: str
    title: str
    text: str
    command: str
    machine: dict[str, str] = field(default_factory=dict)
    tables: list[Table] = field(default_factory=list)

    def path(self) -> Path:
        """Where it is kept."""
        return FOLDER / f"{self.name}.json"

    def earlier_tables(self) -> list[Table]:
        """The tables that its file has, which a part of a benchmark stands beside; none where there is no file."""
        return load(self.path()).tables if self.path().exists() else []

    def earlier_rows(self, *columns: str, table: int = 0) -> dict[tuple, dict]:
        """The rows of one of these tables, by their cells of some columns."""
        rows = [row for found in self.earlier_tables()[table : table + 1] for row in found.rows]
        return {tuple(row[column] for column in columns): row for row in rows}


def machine() -> dict[str, str]:
    """Processor and versions, which every table is read with."""
    import llvmlite
    import torch

    from halfulp.environment import describe_processor

    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=FOLDER.parent, text=True, capture_output=True, check=False
    )
    return {
        "processor": describe_processor(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "llvmlite": llvmlite.__version__,
        "commit": commit.stdout.strip() or "unknown",
    }


def save(result: Result) -> None:
    """Writes results/<name>.json and prints the tables."""
    FOLDER.mkdir(exist_ok=True)
    result.machine = result.machine or machine()
    result.path().write_text(json.dumps(asdict(result), indent=1, default=float) + "\n")
    show(result)


def load(path: Path) -> Result:
    """Read a result back."""
    data = json.loads(path.read_text())
    data["tables"] = [Table(**table) for table in data["tables"]]
    return Result(**data)


def show(result: Result) -> None:
    """Prints every table; a missed bar is red."""
    from rich.console import Console
    from rich.table import Table as Grid

    console = Console(width=150)
    for table in result.tables:
        grid = Grid(title=table.title, caption=table.note or None)
        for column in table.columns:
            grid.add_column(column)
        for row in table.rows:
            style = "red" if row.get("met") is False else "green" if row.get("met") else ""
            grid.add_row(*(table.text(row, column) for column in table.columns), style=style)
        console.print(grid)
