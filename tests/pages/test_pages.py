"""The pages' common ground: templates, embedded data, files written whole."""

import errno
import importlib
import json
import os
from pathlib import Path

import pytest

from halfulp.pages import check_writable, format_share, render_template, require_page_packages, write_file_atomically


@pytest.fixture
def template(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package with a template of its own; returns the package's name."""
    name = f"pages_of_{tmp_path.name.replace('-', '_')}"
    folder = tmp_path / name
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "own.css").write_text("i { color: red }\n")
    (folder / "x.html.j2").write_text(
        '{% extends "base.html.j2" %}{% set command = "test" %}{% block style %}{{ source("own.css") }}{% endblock %}'
        '{% block content %}<h1>{{ text }}</h1><script type="application/json">{{ data | tojson }}</script>'
        "{% endblock %}"
    )
    monkeypatch.syspath_prepend(tmp_path)
    return name


def test_values_are_escaped_and_data_cannot_end_its_element(template: str) -> None:
    text = render_template(template, "x.html.j2", text="<b>&", data={"name": "</script><script>alert(1)"})
    assert "<h1>&lt;b&gt;&amp;</h1>" in text
    assert text.count("</script>") == 1
    assert "<title>halfulp test</title>" in text
    assert "i { color: red }" in text
    assert "prefers-color-scheme: dark" in text


@pytest.mark.parametrize("data", [{"a": "<&>\u2028"}, [], {"x": [1, None, 0.1]}])
def test_embedded_data_is_read_back(template: str, data: object) -> None:
    text = render_template(template, "x.html.j2", data=data)
    assert json.loads(text.partition('application/json">')[2].partition("</script>")[0]) == data


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_numbers_that_json_lacks_are_refused(template: str, number: float) -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        render_template(template, "x.html.j2", data={"x": number})


def test_a_share_is_100_per_cent_only_where_it_is_the_whole() -> None:
    assert [format_share(part) for part in (0.9989, 0.999, 0.9991, 0.9999, 1.0)] == [
        *("99.9%", "99.9%", ">99.9%", ">99.9%", "100%")
    ]


def test_a_share_is_0_per_cent_only_where_it_is_none() -> None:
    shares = {0.0: "0%", 1e-300: "<0.01%", 9.9e-5: "<0.01%", 1e-4: "0.01%", 0.00994: "0.99%", 0.01: "1%", 0.0104: "1%"}
    assert {part: format_share(part) for part in shares} == shares


def test_what_is_missing_is_named_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"the page needs nowhere_to_be: pip install 'halfulp\[cli\]', or rest"):
        require_page_packages("nowhere_to_be", instead="rest")
    real = importlib.import_module

    def without(name: str, package: str | None = None) -> object:
        if name == "jinja2":
            raise ImportError(name)
        return real(name, package)

    monkeypatch.setattr(importlib, "import_module", without)
    with pytest.raises(ValueError, match="the page needs jinja2"):
        render_template("halfulp.pages", "base.html.j2")


def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "page.html"
    path.write_text("old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ValueError, match=r"page\.html: No space left on device"):
        write_file_atomically(path, "new")
    assert [one.name for one in tmp_path.iterdir()] == ["page.html"]
    assert path.read_text() == "old"


def test_a_page_replaces_the_one_before(tmp_path: Path) -> None:
    write_file_atomically(tmp_path / "page.html", "one")
    write_file_atomically(str(tmp_path / "page.html"), "½ ulp")
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == "½ ulp"


def test_where_no_file_can_stand_is_said_before_any_work(tmp_path: Path) -> None:
    check_writable(tmp_path / "page.html")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="it is a folder"):
        check_writable(tmp_path)
    with pytest.raises(ValueError, match="No such file or directory; give another file"):
        check_writable(tmp_path / "gone" / "page.html")


def test_links_are_followed_and_pipes_are_written(tmp_path: Path) -> None:
    real, link, pipe = tmp_path / "real", tmp_path / "link", tmp_path / "pipe"
    real.write_text("old")
    link.symlink_to(real)
    check_writable(link)
    write_file_atomically(link, "new")
    assert link.is_symlink()
    assert real.read_text() == "new"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    check_writable(pipe)
    write_file_atomically(pipe, "new")
    assert os.read(reader, 100) == b"new"
    os.close(reader)
    assert pipe.is_fifo()
