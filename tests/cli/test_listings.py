"""What the listing commands print, for people and as JSON; completion; and what a command does not import."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable

import pytest

from halfulp import formats, recipes
from halfulp.cli import main
from halfulp.trials import tasks

NAMES = {"formats": formats.names, "recipes": recipes.names, "tasks": tasks.names}
# The modules that make a command slow to start.
SLOW = ("torch", "matplotlib", "llvmlite", "scipy")


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a command prints on standard output; it says nothing else and ends with 0."""
    with pytest.raises(SystemExit) as caught:
        main(list(arguments))
    said = capsys.readouterr()
    assert (caught.value.code, said.err) == (0, "")
    return said.out


@pytest.mark.parametrize("command", NAMES)
def test_a_table_names_every_entry(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    table = printed(capsys, command)
    assert [name for name in NAMES[command]() if name not in table] == []


@pytest.mark.parametrize("command", NAMES)
def test_json_is_one_document_with_every_entry(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(printed(capsys, command, "--json"))
    entries = found["formats"] if command == "formats" else found
    assert [entry["name"] for entry in entries] == list(NAMES[command]())


def test_recipes_in_json_make_the_recipes_again(capsys: pytest.CaptureFixture[str]) -> None:
    for entry in json.loads(printed(capsys, "recipes", "--json")):
        assert recipes.Recipe.from_dict(entry) == recipes.get(entry["name"])


@pytest.mark.usefixtures("forked_workers")
def test_compare_prints_its_evidence_as_json(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--task", "digits", "--recipe", "fp32", "--steps", "2", "--seeds", "1", "--workers", "1", "--json"]
    with pytest.raises(SystemExit) as caught:
        main(["compare", *options, "--out", str(tmp_path)])
    assert caught.value.code == 0
    assert json.loads(capsys.readouterr().out) == json.loads((tmp_path / "compare.json").read_text())


@pytest.mark.parametrize(("command", "columns"), [("formats", "80"), ("tasks", "80"), ("recipes", "60"), ("env", "60")])
def test_a_table_stays_within_a_narrow_terminal(command, columns, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("FORCE_COLOR", "1")
    lines = re.sub(r"\x1b\[[^m]*m", "", printed(capsys, command)).splitlines()
    assert max(map(len, lines)) <= int(columns)
    if command == "formats":  # in two tables that begin with the names
        assert [line.split()[:2] for line in lines if line.startswith("fp32")] == [["fp32", "32"], ["fp32", "yes"]]


def completed(words: str) -> list[str]:
    """What bash is offered for the last word of a line."""
    given = {"_HALFULP_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split(" ")) - 1)}
    command = [sys.executable, "-c", "from halfulp.cli import main; main()"]
    done = subprocess.run(command, env={**os.environ, **given}, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    return done.stdout.split()


def test_a_shell_completes_commands() -> None:
    assert completed("halfulp comp") == ["compare"]


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["compare", "--help"], ["formats"]])
def test_what_only_prints_imports_nothing_slow(arguments: list[str]) -> None:
    """`formats` needs torch for its dtypes, and no more than that."""
    slow = [name for name in SLOW if name != "torch"] if arguments == ["formats"] else list(SLOW)
    code = "import sys\nfrom halfulp.cli import main\ntry:\n    main(sys.argv[1:])\n"
    code += f"finally:\n    print([name for name in {slow} if name in sys.modules], file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.strip()) == (0, "[]")


def test_env_prints_every_part_as_a_table_and_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(printed(capsys, "env", "--json"))
    table = printed(capsys, "env")
    words = [found["versions"]["torch"], found["processor"]["name"], "products bfloat16", "engines cpu", "cache folder"]
    assert [word for word in words if word not in table] == []


def test_without_typer_the_data_of_env_are_at_hand(forked: Callable[..., tuple[int, str]]) -> None:
    program = (
        "import sys; sys.modules['typer'] = sys.modules['rich'] = None; from halfulp.cli import main; main(['env'])"
    )
    code, printed = forked(program, number="bare")
    assert (code, printed.count("\n")) == (2, 1)
    assert "pip install 'halfulp[cli]'; halfulp.environment.describe_environment() tells" in printed


def test_outputs_whose_encoding_lacks_letters(forking: Callable) -> None:
    """As Windows' files and pipes: a letter is written as its number, and JSON stays JSON."""
    program = """
import sys, warnings
warnings.resetwarnings()
from halfulp.cli import main
encodings, commands = (text.split(",") for text in sys.argv[1:])
for encoding in encodings:
    sys.stdout.reconfigure(encoding=encoding, errors="strict")
    for command in commands:
        try:
            main(command.split())
        except SystemExit as ending:
            assert not ending.code
        print("----")
    print("====")
"""
    encodings, commands = ["cp1252", "ascii", "iso8859-2"], ["recipes", "tasks", "env", "formats", "formats --json"]
    done = forking(program, ",".join(encodings), ",".join(commands))
    assert (done.code(), done.errors.read_text()) == (0, "")
    *printed, end = done.output.read_bytes().split(b"====\n")
    assert (len(printed), end) == (len(encodings), b"")
    for encoding, text in zip(encodings, printed):
        *tables, content, end = text.decode(encoding).split("----\n")
        assert len(tables) == 4
        assert all(tables)
        assert (bool(json.loads(content)["formats"]), end) == (True, "")
