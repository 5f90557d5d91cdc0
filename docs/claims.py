"""The ledger of strong sentences: what README and the pages promise, and the test or the result file that holds it.

A sentence is strong where it says never, always, every, all bits, same bits, bit for bit, at most or exact.
`python docs/claims.py` prints those that docs/claims.toml lacks, and entries whose sentence is gone.
"""

from __future__ import annotations

import dataclasses
import re
import sys
import tomllib
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
LEDGER = HERE / "claims.toml"
STRONG = re.compile(r"\b(never|always|every|same bits|bit for bit|bit-equal|at most|exact|exactly)\b", re.IGNORECASE)
GENERATED = re.compile(r"<!-- fill .*?<!-- end -->", re.DOTALL)
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
# A sentence ends before a capital, a code word or emphasis; abbreviations of names do not end one.
END = re.compile(r"(?<=[.:;!?])(?<!arXiv:)(?<!i\.e\.)(?<!e\.g\.)\s+(?=[A-Z`*\"(\[])")


@dataclasses.dataclass(frozen=True)
class Claim:
    """One entry of the ledger.

    Attributes:
        page: relative to the repository.
        sentence: as it stands there, on one line.
        holders: tests ("tests/x/test_y.py::test_z"), or files of results.
    """

    page: str
    sentence: str
    holders: tuple[str, ...]


def pages() -> list[Path]:
    """README and the pages that people write."""
    return [ROOT / "README.md", *sorted(HERE.glob("*.md")), *sorted(HERE.glob("problems/*.md"))]


def sentences(text: str) -> list[str]:
    """The sentences of a page, each on one line; code, headings and generated tables left out.

    >>> sentences("# Title\\n\\nOne line\\nmore. Two: `x`.\\n\\n- three\\n  four\\n\\n| a | b |\\n")
    ['One line more.', 'Two:', '`x`.', 'three four', '| a | b |']
    """
    text = FENCE.sub("\n", GENERATED.sub("\n", text))
    text = re.sub(r"^#+ .*$", "\n", text, flags=re.MULTILINE)
    text = re.sub(r"^(?=\s*(?:[-*] |\d+\. |\|))", "\n", text, flags=re.MULTILINE)
    found = []
    for block in re.split(r"\n\s*\n", text):
        block = re.sub(r"^(?:[-*]|\d+\.) ", "", " ".join(block.split()))
        # A row of a table is one claim, whatever its code says.
        found += [block] if block.startswith("|") else [part for part in END.split(block) if part]
    return found


def strong() -> list[tuple[str, str]]:
    """Page and text of every strong sentence, each once."""
    found = [
        (str(page.relative_to(ROOT)), sentence)
        for page in pages()
        for sentence in sentences(page.read_text(encoding="utf-8"))
        if STRONG.search(sentence)
    ]
    return list(dict.fromkeys(found))


def ledger() -> list[Claim]:
    """The entries of docs/claims.toml."""
    entries = tomllib.loads(LEDGER.read_text(encoding="utf-8")).get("claim", [])
    return [Claim(entry["page"], entry["sentence"], tuple(entry["held_by"])) for entry in entries]


def holder_exists(holder: str) -> bool:
    """Whether a test or a file of results is there.

    >>> holder_exists("docs/claims.py"), holder_exists("docs/claims.py::test_nothing")
    (True, False)
    """
    path, _, test = holder.partition("::")
    if not (ROOT / path).is_file():
        return False
    return not test or re.search(rf"^def {re.escape(test)}\(", (ROOT / path).read_text(), re.MULTILINE) is not None


def faults() -> list[str]:
    """What is wrong with the ledger, in words."""
    said, entries = strong(), ledger()
    known = {(claim.page, claim.sentence) for claim in entries}
    found = [f"{page}: no entry for: {sentence}" for page, sentence in said if (page, sentence) not in known]
    found += [f"{claim.page} no longer says: {claim.sentence}" for claim in entries if _key(claim) not in set(said)]
    for claim in entries:
        found += [f"{holder} is not there" for holder in claim.holders if not holder_exists(holder)]
        found += [] if claim.holders else [f"nothing holds: {claim.sentence}"]
    found += ["an entry stands twice"] if len(known) < len(entries) else []
    return found


def _key(claim: Claim) -> tuple[str, str]:
    return claim.page, claim.sentence


if __name__ == "__main__":
    problems = faults()
    print(*problems, sep="\n")
    sys.exit(bool(problems))
