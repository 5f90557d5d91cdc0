"""What a page shows, without its looks: its words, numbers and data, to compare with those on record."""

import re
from html.parser import HTMLParser

from ..records import REMEDY, read_record

# Attributes that change what a reader sees or can do; classes and lengths of bars are among them.
_TOLD = (
    "class",
    "style",
    "title",
    "href",
    "aria-label",
    "aria-sort",
    "scope",
    "colspan",
    "value",
    "min",
    "max",
    "step",
)


class _Words(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.words: list[str] = []
        self._skipped: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        # Styles and code are files of their own; figures are drawn by matplotlib.
        if tag in ("style", "svg") or (tag == "script" and ("type", "application/json") not in attrs):
            self._skipped.append(tag)
        told = [f"{key}={value}" for key, value in attrs if key in _TOLD or key.startswith("data-")]
        if told and not self._skipped:
            self.words.append(f"<{tag} {' '.join(told)}>")

    def handle_endtag(self, tag: str) -> None:
        if self._skipped and self._skipped[-1] == tag:
            self._skipped.pop()

    def handle_data(self, data: str) -> None:
        text = " ".join(data.split())
        if text and not self._skipped:
            self.words.append(text)


def list_page_words(page: str) -> list[str]:
    """List a page's texts and telling attributes in their order; a date, which is today's, is left out."""
    parser = _Words()
    parser.feed(page)
    return [re.sub(r"\b20\d\d-\d\d-\d\d\b", "DATE", word) for word in parser.words]


def check_page(name: str, page: str) -> None:
    """Assert that a page shows what is on record under a name."""
    found = list_page_words(page)
    recorded = read_record("pages", name, found)
    for place, (a, b) in enumerate(zip(found, recorded)):
        assert a == b, f"word {place} of the page {name}, after {recorded[max(0, place - 3) : place]}; {REMEDY}"
    assert len(found) == len(recorded), f"{found[len(recorded) :]} {recorded[len(found) :]}; {REMEDY}"
