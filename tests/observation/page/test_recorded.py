"""Each instrument's page shows what is on record in tests/vectors/pages.json."""

import pytest

from ...pages.words import check_page


@pytest.mark.parametrize("instrument", ["observe", "audit", "forecast"])
def test_a_page_shows_what_is_on_record(instrument: str, pages: dict[str, str]) -> None:
    check_page(instrument, pages[instrument])
