"""How long the command line and an import take to start: `python -m benchmarks.bench_startup`."""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ._results import Result, Table, save

PEER = '''
import typer
app = typer.Typer(help="Two commands.")
@app.command()
def one(count: int = 1, name: str = "a") -> None:
    """The one."""
@app.command()
def two(count: int = 1, name: str = "b") -> None:
    """The other."""
app()
'''
COMMANDS = {"--help": 2.0, "--version": 2.0, "formats": 2.0, "recipes": 2.0, "compare --help": 2.0, "tasks": None}
TEXT = """The processor time (user and system) of `halfulp ...` in a fresh process over that of the --help of a typer \
program of two commands, in turns, the median of the ratios of each turn. `tasks` imports torch, and has no bar. \
Imports: the processor time of a process that imports both, less that of one that imports torch, in turns, the median \
of the differences of each turn; with compiled files of Python there already."""
IMPORTS = {"import torch, halfulp": 0.3, "import torch, halfulp; halfulp.AdamW": None}


def seconds(command: list[str]) -> float:
    """Processor time of one process and its children, which other processes disturb less than the clock."""
    import resource

    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def imports(rounds: int) -> Table:
    """Times what an import of halfulp, and the first use of a name, add to an import of torch."""
    columns = {"code": "", "import torch s": ".2f", "added s": ".3f", "spread": "", "bar": "", "met": ""}
    table = Table("Import beside torch's", columns)
    command = lambda code: [sys.executable, "-c", code]  # noqa: E731
    for code, bar in IMPORTS.items():
        seconds(command(code))
        turns = [(seconds(command("import torch")), seconds(command(code))) for _ in range(rounds)]
        added = sorted(mine - theirs for theirs, mine in turns)
        table.add(
            code=f"`{code}`",
            **{"import torch s": statistics.median(theirs for theirs, _ in turns)},
            **{"added s": statistics.median(added)},
            spread=f"{added[0]:.3f} to {added[-1]:.3f}",
            bar="" if bar is None else f"at most {bar:g}",
            met=None if bar is None else statistics.median(added) <= bar,
        )
    return table


def main() -> None:
    """Times all commands and imports, and keeps the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    columns = {"command": "", "peer ms": ".0f", "ms": ".0f", "ratio": ".2f", "spread": "", "bar": "", "met": ""}
    table = Table("Start of the command line", columns)
    with tempfile.TemporaryDirectory() as folder:
        peer = [sys.executable, str(Path(folder, "peer.py")), "--help"]
        Path(peer[1]).write_text(PEER)
        for words, bar in COMMANDS.items():
            own = [sys.executable, "-m", "halfulp.cli", *words.split()]
            seconds(peer), seconds(own)
            turns = [(seconds(peer), seconds(own)) for _ in range(rounds)]
            ratios = sorted(mine / theirs for theirs, mine in turns)
            ratio = statistics.median(ratios)
            table.add(
                command=f"halfulp {words}",
                **{"peer ms": 1e3 * statistics.median(theirs for theirs, _ in turns)},
                ms=1e3 * statistics.median(mine for _, mine in turns),
                ratio=ratio,
                spread=f"{ratios[0]:.2f} to {ratios[-1]:.2f}",
                bar="" if bar is None else f"at most {bar:g}",
                met=None if bar is None else ratio <= bar,
            )
    title = f"The start of a process ({time.strftime('%Y-%m-%d')})"
    tables = [imports(rounds), table]
    save(Result("startup", title, TEXT, "python -m benchmarks.bench_startup", tables=tables))


if __name__ == "__main__":
    main()
