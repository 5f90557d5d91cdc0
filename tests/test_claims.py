"""The ledger of strong sentences: each stands on its page and has a holder, and no page has one that lacks an entry."""

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def claims():
    specification = importlib.util.spec_from_file_location("claims", ROOT / "docs" / "claims.py")
    module = importlib.util.module_from_spec(specification)
    sys.modules["claims"] = module
    specification.loader.exec_module(module)
    yield module
    del sys.modules["claims"]


def test_every_strong_sentence_has_an_entry_and_every_entry_its_sentence_and_holder(claims):
    assert not claims.faults(), "\n".join(claims.faults())


def test_a_fault_is_seen(claims, monkeypatch):
    page, sentence = claims.strong()[0]
    entries = claims.ledger()
    monkeypatch.setattr(claims, "ledger", lambda: [claim for claim in entries if claim.sentence != sentence])
    assert any(sentence in fault and "no entry" in fault for fault in claims.faults())
    gone = claims.Claim(page, "This was never said.", ("docs/claims.py", "tests/test_nothing.py"))
    monkeypatch.setattr(claims, "ledger", lambda: [*entries, gone])
    assert [fault for fault in claims.faults() if "no longer says" in fault or "is not there" in fault] == [
        f"{page} no longer says: This was never said.",
        "tests/test_nothing.py is not there",
    ]


def test_sentences_are_cut_where_they_end(claims):
    code = "```python\nalways = 1\n```\n\n"
    text = f"# H\n\nOne `a. b`\nline: Two never.\n\n{code}- every item\n  goes on.\n\n| a | at most b |\n"
    assert claims.sentences(text) == ["One `a. b` line:", "Two never.", "every item goes on.", "| a | at most b |"]
