"""The page that `halfulp compare` writes, checked for people who do not see it as its author does.

axe-core looks for missing labels, roles and contrast in headless Chromium, on a wide and a narrow screen, in light,
dark and print; colorspacious tells how far the curves' colours stay apart under each kind of colour blindness. Needs a
chromium, and in an environment of its own: pip install playwright axe-playwright-python colorspacious.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import re
import shutil
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
VIEWS = [(scheme, width, "screen") for scheme in ("light", "dark") for width in (1280, 390)] + [("dark", 794, "print")]
BLINDNESS = {"none": None, "green": "deuteranomaly", "red": "protanomaly", "blue": "tritanomaly"}


def violations(page: Path) -> list[dict]:
    """What axe-core objects to, per view."""
    from axe_playwright_python.sync_playwright import Axe
    from playwright.sync_api import sync_playwright

    rows = []
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"])
        for scheme, width, media in VIEWS:
            view = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
            view.emulate_media(media=media, color_scheme=scheme)
            view.goto(page.resolve().as_uri())
            found = Axe().run(view).response
            wide = view.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth")
            objections = [f"{one['id']}: {one['nodes'][0]['html'][:120]}" for one in found["violations"]]
            rows.append(
                {
                    "scheme": scheme,
                    "width": width,
                    "media": media,
                    "passes": len(found["passes"]),
                    "violations": objections,
                    "scrolls_sideways": wide,
                }
            )
            view.close()
        browser.close()
    return rows


def _rgb(colour: str) -> list[float]:
    return [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]


def distances(page: Path) -> list[dict]:
    """The nearest two of the curves' colours, in units of CAM02-UCS, per palette and kind of colour blindness."""
    import numpy as np
    from colorspacious import cspace_convert

    palettes = re.findall(r"--c0: .*", page.read_text(encoding="utf-8"))
    rows = []
    for scheme, line in zip(("light", "dark"), palettes, strict=True):
        colours = re.findall(r"--c\d: (#\w{6})", line)
        for name, kind in BLINDNESS.items():
            seen = [_rgb(colour) for colour in colours]
            if kind is not None:
                seen = cspace_convert(seen, {"name": "sRGB1+CVD", "cvd_type": kind, "severity": 100}, "sRGB1")
            places = cspace_convert(np.clip(seen, 0, 1), "sRGB1", "CAM02-UCS")
            nearest = min(
                (float(np.linalg.norm(places[i] - places[j])), colours[i], colours[j])
                for i, j in itertools.combinations(range(len(colours)), 2)
            )
            rows.append({"scheme": scheme, "missing": name, "distance": round(nearest[0], 1), "pair": nearest[1:]})
    return rows


def main() -> None:
    """Check a page and print and write what was found; the exit code is 1 where axe-core objects."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("page", nargs="?", help="a compare.html; default: made from docs/results/two-heads.json")
    parser.add_argument("--out", default=str(ROOT / "benchmarks/results/page_accessibility.json"))
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        page = Path(given.page) if given.page else _example(Path(folder))
        views, near = violations(page), distances(page)
    versions = {name: importlib.metadata.version(name) for name in ("playwright", "axe-playwright-python")}
    Path(given.out).write_text(json.dumps({"versions": versions, "views": views, "colours": near}, indent=1) + "\n")
    for row in views:
        said = row["violations"] or "nothing to object to"
        print(f"{row['media']:<6} {row['scheme']:<5} {row['width']:>4} px: {row['passes']} rules pass; {said}")
    for row in near:
        print(f"{row['scheme']:<5} without {row['missing']:<5}: nearest pair {row['distance']} apart")
    raise SystemExit(any(row["violations"] for row in views))


def _example(folder: Path) -> Path:
    """A page with many recipes; halfulp runs in the environment of this script's Python or is found beside it."""
    from halfulp.trials import Evidence

    text = (ROOT / "docs/results/two-heads.json").read_text(encoding="utf-8")
    Evidence.from_json(text).to_html(folder / "compare.html")
    return folder / "compare.html"


if __name__ == "__main__":
    main()
