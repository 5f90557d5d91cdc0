"""The whole test suite under other versions of torch: `python tests/compatibility/suite.py 2.6.0:3.11 2.11.0:3.12`.

For each pair it makes a virtual environment of that torch and, beside it, of what constraints.txt pins, and runs every
test there with a fixed seed. The table goes to benchmarks/results/suites.json: a row per pair, which stands until the
pair is run again, with the names of the tests that failed. Run by hand, not by pytest.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(Path(__file__).parent))
from benchmarks._results import Result, Table, load, machine, save  # noqa: E402
from run import interpreter  # noqa: E402

PAIRS = ("2.6.0:3.11", "2.8.0:3.11", "2.11.0:3.12")
SEED = 1234567
COLUMNS = {"torch": "", "python": "", "passed": ",d", "failed": "", "skipped": ",d", "fell short": ""}
TEXT = """Every test, with one seed and two workers, beside the packages that constraints.txt pins. \
Skipped are tests of what a version of torch, the machine or the environment lacks; each says what."""
ASK = "import json, platform, torch; print(json.dumps([torch.__version__, platform.python_version()]))"


def environment(torch: str, python: str, folder: Path) -> Path:
    """Make the virtual environment of a pair; return its interpreter."""
    subprocess.run([interpreter(python), "-m", "venv", str(folder)], check=True)
    own = folder / "bin" / "python"
    pinned = folder / "constraints.txt"
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    # What torch itself asks for in one version, another in each of its own.
    others = [line for line in lines if not line.startswith(("torch==", "sympy=="))]
    pinned.write_text("\n".join([f"torch=={torch}", *others]) + "\n")
    install = [str(own), "-m", "pip", "install", "-q", "-c", str(pinned), "-e", f"{ROOT}[cli,test]"]
    subprocess.run(install, check=True)
    return own


def suite(python: Path, workers: int, seed: int, rest: list[str]) -> dict:
    """Run the suite with an interpreter; return its row."""
    found = subprocess.run([str(python), "-c", ASK], capture_output=True, text=True, check=True)
    torch, version = json.loads(found.stdout)
    with tempfile.TemporaryDirectory() as folder:
        report, begin = Path(folder, "report.xml"), time.monotonic()
        command = [str(python), "-m", "pytest", "-q", "-n", str(workers), f"--hypothesis-seed={seed}", *rest]
        given = {"HALFULP_TEST_SEED": str(seed), "HALFULP_CACHE_DIR": f"{folder}/kernels", "OMP_NUM_THREADS": "1"}
        paths = {"PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT / "src")}
        environment = {**os.environ, **given, **paths, "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}
        subprocess.run([*command, f"--junitxml={report}"], cwd=ROOT, env=environment, check=False)
        if not report.exists():
            raise SystemExit(f"no test ran under torch {torch}: see what pytest says above")
        cases = list(ET.parse(report).iter("testcase"))
    failed = [x for x in cases if x.find("failure") is not None or x.find("error") is not None]
    skipped = sum(case.find("skipped") is not None for case in cases)
    return {
        "torch": torch,
        "python": version,
        "passed": len(cases) - len(failed) - skipped,
        "failed": len(failed),
        "skipped": skipped,
        "minutes": (time.monotonic() - begin) / 60,
        "commit": machine()["commit"],
        "fell short": ", ".join(sorted(str(case.get("name")) for case in failed)),
    }


def keep(row: dict) -> None:
    """Put a row into the file, in place of one of the same versions, and print the table."""
    result = Result("suites", "The whole suite by version of torch", TEXT, "python tests/compatibility/suite.py")
    rows = load(result.path()).tables[0].rows if result.path().exists() else []
    rows = [old for old in rows if (old["torch"], old["python"]) != (row["torch"], row["python"])] + [row]
    table = Table("torch x Python, two workers", COLUMNS)
    table.rows = sorted(rows, key=lambda row: [*map(int, re.findall(r"\d+", f"{row['torch']} {row['python']}"))])
    result.tables = [table]
    save(result)


def main() -> None:
    """Run the suite under every pair, or under an interpreter that has a torch and the test dependencies."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pairs", nargs="*", default=PAIRS, help="torch:python, such as 2.8.0:3.11")
    parser.add_argument("--python", type=Path, help="an interpreter with everything installed, in place of pairs")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=SEED)
    options, rest = parser.parse_known_args()
    if options.python:
        if options.pairs != PAIRS:
            parser.error("give pairs, or --python: the whole suite runs, of which no part is chosen")
        keep(suite(options.python, options.workers, options.seed, rest))
        return
    for pair in options.pairs:
        torch, python = pair.split(":")
        with tempfile.TemporaryDirectory() as place:
            keep(suite(environment(torch, python, Path(place, "venv")), options.workers, options.seed, rest))


if __name__ == "__main__":
    main()
