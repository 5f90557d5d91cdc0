"""The wheel without constraints under several versions of torch and Python: `python tests/compatibility/run.py`.

For each pair it makes a virtual environment (5 GB with torch's CUDA libraries), installs that torch and the wheel, and
takes one step of every system. The table goes to benchmarks/results/compatibility.json. Run by hand, not by pytest.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAIRS = ("2.6.0:3.11", "2.6.0:3.13", "2.8.0:3.11", "2.11.0:3.12", "2.13.0:3.11", "2.15.0:3.11", "2.15.0:3.13")


def interpreter(version: str) -> str:
    """A Python of a version such as "3.12": this one, one of the path, or one of pyenv's, which may be on no path."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = [sys.executable, shutil.which(f"python{version}"), *map(str, sorted(pyenv.glob(f"{version}.*/bin/python")))]
    ask = "import sys; print('.'.join(map(str, sys.version_info[:2])))"
    for path in filter(None, found):
        # pyenv leaves a python3.12 on the path that only says which versions are installed.
        said = subprocess.run([path, "-c", ask], capture_output=True, text=True, check=False)
        if said.returncode == 0 and said.stdout.strip() == version:
            return path
    raise SystemExit(f"no Python {version}: neither python{version} on the path nor one of {pyenv} runs")


def one(torch: str, python: str, wheel: Path, folder: Path) -> dict:
    """What one_step.py says under one pair."""
    subprocess.run([interpreter(python), "-m", "venv", str(folder)], check=True)
    own = folder / "bin" / "python"
    for package in (f"torch=={torch}", f"{wheel}[cli]"):
        subprocess.run([str(own), "-m", "pip", "install", "-q", package], check=True)
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {
        "OMP_NUM_THREADS": "1",
        "HALFULP_CACHE_DIR": str(folder / "kernels"),
    }
    command = [str(own), str(Path(__file__).with_name("one_step.py"))]
    done = subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def table(results: list[dict]) -> None:
    """Keep and print what was found; earlier pairs of the file stay unless they were run again."""
    sys.path.insert(0, str(ROOT))
    from benchmarks._results import Result, Table, load, save

    columns = {"torch": "", "python": "", "passed": "", "lacking operators": "", "fell short": ""}
    made = Table("torch x Python", columns)
    path = Result("compatibility", "", "", "").path()
    rows = {(r["torch"], r["python"]): r for r in (load(path).tables[0].rows if path.exists() else [])}
    for found in results:
        short = {name: what for name, what in found["systems"].items() if what != "passed"}
        rows[found["torch"], found["python"]] = {
            "torch": found["torch"],
            "python": found["python"],
            "passed": f"{len(found['systems']) - len(short)} of {len(found['systems'])}",
            "lacking operators": ", ".join(name for name in found["lacking operators"] if name.count(".")) or "none",
            "fell short": "; ".join(f"{name}: {what}" for name, what in short.items()),
        }
    made.rows = [rows[key] for key in sorted(rows, key=lambda key: [*map(int, re.findall(r"\d+", " ".join(key)))])]
    text = (
        "The wheel takes one step of every system; installed without constraints, or with those of constraints.txt "
        "beside torch where documents were read (--read)."
    )
    save(Result("compatibility", "Versions", text, "python tests/compatibility/run.py", tables=[made]))


def main() -> None:
    """Run the pairs, or read the documents that one_step.py printed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pairs", nargs="*", default=PAIRS, help="torch:python, such as 2.15.0:3.13")
    parser.add_argument("--read", nargs="*", type=Path, help="files that one_step.py has written, in place of running")
    options = parser.parse_args()
    if options.read:
        table([json.loads(path.read_text().splitlines()[-1]) for path in options.read])
        return
    with tempfile.TemporaryDirectory() as folder:
        build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", str(ROOT), "-w", folder]
        subprocess.run(build, check=True)
        (wheel,) = Path(folder).glob("*.whl")
        for number, pair in enumerate(options.pairs):
            torch, python = pair.split(":")
            with tempfile.TemporaryDirectory() as place:
                table([one(torch, python, wheel, Path(place, f"venv{number}"))])


if __name__ == "__main__":
    main()
