"""Each code has a page, and each page a code; the page says what the class says and which instruments show it."""

from pathlib import Path

import pytest

from halfulp.observation.findings import FINDING_KINDS

FOLDER = Path(__file__).parents[3] / "docs" / "findings"
OWN = {code: kind for code, kind in FINDING_KINDS.items() if kind.__module__.startswith("halfulp.")}


def test_each_code_has_a_page_and_each_page_a_code():
    assert {page.stem for page in FOLDER.glob("*.md")} == set(OWN)


@pytest.mark.parametrize("code", sorted(OWN))
def test_a_page_says_what_the_class_says(code):
    text = (FOLDER / f"{code}.md").read_text()
    assert text.startswith(f"# {code}\n\n{OWN[code].__doc__} Shown by ")
    said = text.partition(" Shown by ")[2].partition(". All codes")[0]
    assert said == ", ".join(f"`hu.{name}`" for name in OWN[code].list_instruments())
    headings = [line for line in text.splitlines() if line.startswith("## ")]
    assert headings == ["## What it means", "## How it shows", "## The cure"]
    assert "```python" in text
    assert text.count("\n") <= 80
