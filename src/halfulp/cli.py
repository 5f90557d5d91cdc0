"""The command line: halfulp compare | formats."""

import importlib.metadata
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the command line and exit; a mistake of the user is one line on stderr and exit code 2."""
    try:
        import jinja2  # noqa: F401
        import matplotlib  # noqa: F401
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ImportError as error:
        _fail(f"the command line needs {error.name}: pip install 'halfulp[cli]'")
    from .trials import TrialError

    try:
        code = application()(arguments, prog_name="halfulp", standalone_mode=False)
    except (ValueError, TrialError) as error:
        _fail(str(error))
    except KeyboardInterrupt:
        _fail("interrupted")
    except Exception as error:
        if type(error).__name__ == "Abort":
            _fail("interrupted")
        if not hasattr(error, "format_message"):
            raise
        _fail(f"{error.format_message().rstrip('.')}; see halfulp --help")
    sys.exit(code if isinstance(code, int) else 0)


def application() -> Any:
    """The typer application, made when it is needed, so that this module imports without typer."""
    import typer

    from .trials import DEFAULT_RECIPES, DEFAULT_TASKS

    app = typer.Typer(
        help="Train in 16, 8 and fewer bits with 32-bit accuracy, and see why it works.",
        add_completion=False,
        pretty_exceptions_enable=False,
    )

    @app.callback(invoke_without_command=True)
    def root(
        context: typer.Context,
        version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    ) -> None:
        if version:
            print(f"halfulp {importlib.metadata.version('halfulp')}")
        elif context.invoked_subcommand is None:
            print(context.get_help())

    @app.command()
    def compare(
        task: Annotated[list[str] | None, typer.Option(help=_several("Tasks", DEFAULT_TASKS))] = None,
        recipe: Annotated[list[str] | None, typer.Option(help=_several("Recipes", DEFAULT_RECIPES))] = None,
        seeds: Annotated[int, typer.Option(help="How many seeds; a verdict needs 3.")] = 2,
        steps: Annotated[int | None, typer.Option(help="Steps per trial; default: the task's own.")] = None,
        data: Annotated[str | None, typer.Option(help="Folder for tasks that read files.")] = None,
        out: Annotated[str, typer.Option(help="Folder for compare.json and compare.html.")] = "halfulp-compare",
        workers: Annotated[int | None, typer.Option(help="Processes; default: one per core, at most 8.")] = None,
        resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted comparison.")] = False,
    ) -> None:
        """Train tasks under several recipes, and show which keep float32's accuracy, at what memory and speed."""
        tasks, recipes = _split(task, DEFAULT_TASKS), _split(recipe, DEFAULT_RECIPES)
        _compare(tasks, recipes, seeds=seeds, steps=steps, data=data, out=out, workers=workers, resume=resume)

    @app.command()
    def formats() -> None:
        """Print the number formats as a table."""
        _formats()

    return app


def _compare(tasks: list[str], recipes: list[str], *, out: str, **options: Any) -> None:
    from .trials import TrialError, compare
    from .trials._progress import Progress

    with Progress() as progress:
        try:
            evidence = compare(tasks, recipes, out=out, listen=progress, **options)
        except KeyboardInterrupt:
            progress.bars.stop()
            _fail(f"interrupted; {_kept(progress, out)}")
        except TrialError as error:
            progress.bars.stop()
            if error.details:
                Path(out, "error.log").write_text(error.details, encoding="utf-8")
                error = f"{error} (more in {Path(out, 'error.log')})"
            _fail(f"{error}; {_kept(progress, out)}")
    _print_tables(evidence)
    print(f"\n{Path(out, 'compare.html')} shows the curves; {Path(out, 'compare.json')} holds the numbers.")


def _kept(progress: Any, out: str) -> str:
    return f"{progress.finished} of {progress.total} trials are kept in {out}, --resume continues"


def _console() -> Any:
    """A console as wide as the terminal, and wide enough for every column where there is none."""
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=160)


def _print_tables(evidence: Any) -> None:
    from rich.text import Text

    from .trials._table import cells, notes

    console = _console()
    for task in evidence.tasks():
        rows = evidence.rows(task)
        lines = [cells(evidence, row) for row in rows]
        headers = list(lines[0])
        parts = [headers] if console.width >= 136 else [headers[:4], ["recipe", *headers[4:]]]
        console.print(f"\n[bold]{task}[/bold]")
        for part in parts:
            console.print(_table(part, rows, lines))
        for note in notes(evidence, task):
            console.print(Text(note, style="dim"))


def _table(headers: list[str], rows: list[Any], lines: list[dict[str, str]]) -> Any:
    from rich.table import Table

    styles = {"worse": "red", "diverged": "red", "no difference": "green", "better": "green"}
    table = Table(header_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for header in headers:
        table.add_column(header, justify="left" if header in ("recipe", "verdict") else "right", no_wrap=True)
    for row, line in zip(rows, lines):
        table.add_row(*(line[header] for header in headers), style=styles.get(row.verdict or "", ""))
    return table


_COLUMNS = {
    "name": "name",
    "bits": "bits",
    "exponent_bits": "exp",
    "mantissa_bits": "man",
    "max": "largest",
    "smallest_normal": "normal",
    "smallest_subnormal": "subnormal",
    "eps": "eps",
    "binades": "binades",
    "infinities": "inf",
    "nan": "nan",
    "overflow": "overflow",
    "torch_dtype": "torch",
}


def _formats() -> None:
    from rich.table import Table

    from .formats import rows

    console = _console()
    fields = (
        list(_COLUMNS)
        if console.width >= 130
        else [field for field in _COLUMNS if field not in ("nan", "overflow", "torch_dtype", "infinities")]
    )
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 1, 0, 0))
    for field in fields:
        words = field in ("name", "nan", "overflow", "torch_dtype")
        table.add_column(_COLUMNS[field], justify="left" if words else "right", no_wrap=True)
    for row in rows():
        table.add_row(*(_cell(row[field]) for field in fields))
    console.print(table)


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    return "–" if value is None else str(value)


def _several(kind: str, default: Sequence[str]) -> str:
    return f"{kind}, separated by commas or one option each. Default: {', '.join(default)}"


def _split(given: list[str] | None, default: Sequence[str]) -> list[str]:
    """``["a,b", "c"]`` as ``["a", "b", "c"]``; the default where nothing was given.

    >>> _split(["digits, text", "cifar10"], ["text"]), _split(None, ["text"])
    (['digits', 'text', 'cifar10'], ['text'])
    """
    if given is None:
        return list(default)
    return [name.strip() for part in given for name in part.split(",") if name.strip()]


def _fail(message: str) -> NoReturn:
    """End with one line on stderr and exit code 2."""
    print(f"halfulp: {' '.join(str(message).split())}", file=sys.stderr)
    sys.exit(2)
