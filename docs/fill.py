"""Fills tables of README.md, CONTRIBUTING.md and docs/*.md from the files that hold the numbers: `python docs/fill.py`.

A place to fill is what stands between `<!-- fill NAME -->` and `<!-- end -->`, where NAME is a function in
docs/fillers. What has not been measured yet stays empty. The rows of comparisons in docs/results are computed again
from their trials, and the pages of docs/benchmarks from the files of benchmarks/results. With --check nothing is
written, and the exit code is 1 where a file differs.
"""

import argparse
import json
import re
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
RESULTS = HERE / "results"
PLACE = re.compile(r"(<!-- fill ([\w-]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
sys.path.insert(0, str(ROOT))

from benchmarks import tables  # noqa: E402
from docs.fillers import PLACES  # noqa: E402


def filled(page: str) -> str:
    """A page with every place filled.

    Raises:
        ValueError: a place whose name means nothing.
    """

    def fill(match: re.Match) -> str:
        name = match[2]
        if name not in PLACES:
            raise ValueError(f"nothing fills {name!r}; there are {', '.join(PLACES)}")
        content = PLACES[name]()
        return f"{match[1]}{content}\n{match[4]}" if content else f"{match[1]}{match[4]}"

    return PLACE.sub(fill, page)


def recomputed(comparison: str) -> str:
    """The JSON of a comparison with the rows that follow from its trials today."""
    from halfulp.trials import Evidence

    return Evidence.from_json(comparison).to_json()


def comparisons() -> list[Path]:
    """The files that `halfulp compare` wrote."""
    return [path for path in sorted(RESULTS.glob("*.json")) if "trials" in json.loads(path.read_text(encoding="utf-8"))]


def pages() -> list[Path]:
    """The pages that people write."""
    written = sorted(path for path in HERE.glob("*.md"))
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *written]


def main() -> None:
    """Bring every file up to date, or say which differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    stale = tables.write(check)
    for path in [*comparisons(), *pages()]:
        text = path.read_text(encoding="utf-8")
        new = recomputed(text) if path.suffix == ".json" else filled(text)
        if new != text:
            stale.append(path.name)
            if not check:
                path.write_text(new, encoding="utf-8")
    if check and stale:
        sys.exit(f"not in step with the numbers: {', '.join(stale)}; run python docs/fill.py")


if __name__ == "__main__":
    main()
