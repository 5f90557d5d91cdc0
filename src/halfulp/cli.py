"""The command line: halfulp compare | verify | formats."""

import contextlib
import importlib.metadata
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

# What typer makes of a KeyboardInterrupt; older ones raise Abort.
_INTERRUPTED = 130


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the command line and exit; a mistake of the user, or Ctrl-C, is one line on stderr and exit code 2."""
    try:
        sys.exit(_run(arguments))
    except KeyboardInterrupt:
        _fail("interrupted")


def _run(arguments: list[str] | None) -> int:
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
    except (ValueError, NotImplementedError, TrialError) as error:
        _fail(str(error))
    except Exception as error:
        if type(error).__name__ == "Abort":
            raise KeyboardInterrupt from None
        if not hasattr(error, "format_message"):
            raise
        _fail(f"{error.format_message().rstrip('.')}; see halfulp --help")
    if code == _INTERRUPTED:
        raise KeyboardInterrupt
    return code if isinstance(code, int) else 0


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
    def verify(
        target: Annotated[
            str | None,
            typer.Argument(help="package.module:function that returns (model, batch) or (model, batch, loss)."),
        ] = None,
        task: Annotated[str | None, typer.Option(help="A task's model and batch instead of a target.")] = None,
        recipe: Annotated[str, typer.Option(help="A recipe with scaled payloads or a gradient scale.")] = "scaled-fp16",
        trials: Annotated[int, typer.Option(help="How many draws of scales.")] = 2,
        seed: Annotated[int, typer.Option(help="Of the scales.")] = 0,
        data: Annotated[str | None, typer.Option(help="Folder for tasks that read files.")] = None,
        out: Annotated[str | None, typer.Option(help="A file for the result as JSON.")] = None,
    ) -> int:
        """Prove on a model that a recipe's scales change no gradient, or name the first operator that does."""
        return _verify(target, task, recipe, data=data, out=out, trials=trials, seed=seed)

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
    return console if console.is_terminal else Console(highlight=False, width=200)


def _print_tables(evidence: Any) -> None:
    from rich.text import Text

    from .trials._table import cells, notes

    console = _console()
    for task in evidence.tasks():
        rows = evidence.rows(task)
        lines = [cells(evidence, row) for row in rows]
        headers = list(lines[0])
        widths = (2 + max(len(header), *(len(line[header]) for line in lines)) for header in headers)
        parts = [headers] if console.width >= sum(widths) else [headers[:4], ["recipe", *headers[4:]]]
        console.print(f"\n[bold]{task}[/bold]")
        for part in parts:
            console.print(_table(part, rows, lines))
        for note in notes(evidence, task):
            console.print(Text(note, style="dim"))


def _table(headers: list[str], rows: list[Any], lines: list[dict[str, str]]) -> Any:
    from rich.table import Table

    styles = {"worse": "red", "diverged": "red", "unclear": "yellow", "no difference": "green", "better": "green"}
    table = Table(header_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for header in headers:
        table.add_column(header, justify="left" if header in ("recipe", "verdict") else "right", no_wrap=True)
    for row, line in zip(rows, lines):
        table.add_row(*(line[header] for header in headers), style=styles.get(row.verdict or "", ""))
    return table


def _verify(
    target: str | None, task: str | None, recipe: str, *, data: str | None, out: str | None, **options: int
) -> int:
    """Exit code 0 if all gradients agree and nothing fell back, else 1."""
    import json

    from .recipes import verify

    if (target is None) == (task is None):
        _fail("give either a target, package.module:function, or --task with a task's name")
    if out is not None:
        _check_writable(out)
    model, batch, loss = _of_task(task, data, options["seed"]) if task else _of_target(target)
    with _or_fail(f"verifying {target or task} raised", (ValueError, TypeError, NotImplementedError)):
        found = verify(model, batch, recipe, loss=loss, **options)
    _print_verification(found)
    if out is not None:
        with _writing(out):
            Path(out).write_text(json.dumps(found.to_dict(), indent=2), encoding="utf-8")
    return 0 if found.passed else 1


def _check_writable(out: str) -> None:
    """Before the work, and so that nothing is left if that fails."""
    path = Path(out).resolve()
    new = not path.exists()
    with _writing(out):
        path.open("a").close()
    if new:
        path.unlink()


@contextlib.contextmanager
def _writing(out: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        _fail(f"cannot write {out}: {error.strerror or error}; give another file with --out")


@contextlib.contextmanager
def _or_fail(doing: str, telling: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """For code of the user's, which may raise anything: a traceback's exit code would be that of FAILED.

    Exceptions that are ``telling`` speak for themselves; before others goes what was being done, and their name.
    """
    try:
        yield
    except telling as error:
        _fail(str(error))
    except (Exception, SystemExit) as error:
        _fail(f"{doing} {type(error).__name__}: {error}".rstrip(": "))


def _of_task(name: str, data: str | None, seed: int) -> tuple[Any, Any, Any]:
    from .trials.tasks import get

    task = get(name, data)
    if hasattr(task, "trial"):
        _fail(f"task {name!r} has a training loop of its own and no model to verify")
    found = task.load()
    model = task.model(found, seed)
    inputs, targets = next(task.batches(found, seed, 1))
    return model, inputs, lambda logits: task.loss(logits, targets)


def _of_target(target: str) -> tuple[Any, Any, Any]:
    import importlib

    name, _, function = target.partition(":")
    if not name or not function:
        _fail(f"{target!r} names no {'function' if name else 'module'}: write package.module:function")
    if name.endswith(".py"):
        module = name.removesuffix(".py").strip("./").replace("/", ".")
        _fail(f"{target!r} names a file: write the module without .py, {module}:{function}")
    # As `python -m` does: modules of the folder that one stands in are found.
    sys.path.insert(0, str(Path.cwd()))
    with _or_fail(f"cannot take {function!r} from {name!r}:"):
        make = getattr(importlib.import_module(name), function)
    if not callable(make):
        _fail(f"{target} is a {type(make).__name__}: give a function that returns (model, batch) or with a loss")
    with _or_fail(f"{target} raised"):
        made = make()
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        _fail(f"{target} returned {type(made).__name__}: return (model, batch) or (model, batch, loss)")
    return (*made, None) if len(made) == 2 else made


def _print_verification(found: Any) -> None:
    from rich.table import Table
    from rich.text import Text

    console = _console()
    style = "green" if found.passed else "red"
    console.print(Text(str(found), style=style))
    unequal = sorted(((d, n) for n, d in found.gradients.items() if d), reverse=True)[:20]
    if not unequal:
        return
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("parameter")
    table.add_column("relative difference of its gradient", justify="right")
    for difference, name in unequal:
        table.add_row(name, f"{difference:.1e}")
    console.print(table)


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
