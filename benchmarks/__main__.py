"""Runs every benchmark, or the named ones, and writes the page: `python -m benchmarks [name ...]`."""

import argparse
import subprocess
import sys

from ._harness import ROOT
from .peers import PYTHON

NAMES = (
    "quantize",
    "products",
    "adamw",
    "small_updates",
    "verdicts",
    "verify",
    "states",
    "running_maximum",
    "overhead",
    "claims",
    "defaults",
    "peers",
    "exhaustive",
    "bits",
    "accuracy",
    "mctensor",
    "mctensor_experiments",
    "mctensor_operators",
    "mammals",
    "op_coverage",
    "grad_modes",
    "scaled",
    "scaled_architectures",
    "scaled_starts",
    "formulas",
    "wide",
    "two_families",
    "gradient_exactness",
    "gradient_programs",
    "gradient_overhead",
    "observe",
    "gradient_safety",
    "gradient_schedules",
    "gradient_trainings",
    "suite",
    "startup",
    "many_tensors",
    "fixed_costs",
    "torch_contract",
    "compiled",
    "processes",
    "audit",
    "tune",
    "family",
    "house",
)
ASIDE = ("gpu",)  # not among all: they need what most machines lack


def main() -> None:
    """Each benchmark in a process of its own, with the peers' Python where it was built."""
    parser = argparse.ArgumentParser(description=__doc__)
    about = f"any of {', '.join(NAMES)}; all by default; or gpu, by itself, with its options behind it"
    parser.add_argument("names", nargs="*", metavar="name", help=about)
    given = sys.argv[1:]
    options = given[given.index("gpu") + 1 :] if given[:1] == ["gpu"] else []
    chosen = parser.parse_args(given[: len(given) - len(options)]).names or list(NAMES)
    known = (*NAMES, *ASIDE)
    unknown = sorted(set(chosen) - set(known))
    if unknown:
        parser.error(f"no benchmark {', '.join(unknown)}; there are {', '.join(known)}")
    python = str(PYTHON) if PYTHON.exists() else sys.executable
    if python == sys.executable and not PYTHON.exists():
        print("benchmarks/.peers is not there, so peers count as absent: python -m benchmarks.peers builds it")
    failed = []
    for name in chosen:
        print(f"== {name}", flush=True)
        command = [python, "-W", "ignore", "-m", f"benchmarks.bench_{name}", *options]
        done = subprocess.run(command, cwd=ROOT, check=False)
        if done.returncode != 0:
            failed.append(name)
    if "--dry-run" not in options:
        subprocess.run([python, "-m", "benchmarks.tables"], cwd=ROOT, check=True)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
