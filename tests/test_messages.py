"""What users are told: refusals of the public face over wrong inputs, and the words of every raise in the source."""

import ast
import functools
import inspect
import re
from pathlib import Path

import pytest
import torch

import halfulp as hu

ROOT = Path(hu.__file__).parent
WRONG = {
    "a number": 3,
    "None": None,
    "a text": "nonsense",
    "an empty list": [],
    "an object": object(),
    "a class": torch.nn.Linear,
    "a module": torch.nn.Identity(),
    "integers": torch.ones(1, dtype=torch.int64),
    "a dict": {"a": 1},
}
# The second argument, where one is needed.
SECOND = {"emulate": "bf16", "convert": "bf16", "quantize": "bf16", "verify": "scaled-fp16", "wrap": [torch.ones(1)]}
# Data classes of which Python itself says which fields they have, and what trains when it is called.
LEFT_OUT = {"Recipe", "Policy", "WeightUpdate", "Optimizer", "compare", "__getattr__"}
RAW = re.compile(
    r"has no attribute|unsupported operand|not subscriptable|object is not (iterable|callable)|unexpected keyword"
    r"|must be real number|cannot unpack|not supported between|list index|\ba (int|object|Identity|ordered)\b"
)


def _face():
    for module in (hu, hu.optim, hu.gradients):
        for name in sorted(dir(module)):
            value = getattr(module, name)
            if callable(value) and not inspect.ismodule(value) and name not in LEFT_OUT:
                yield f"{module.__name__}.{name}", value


FACE = dict(_face())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FACE)
def test_what_is_given_wrongly_is_refused_in_words(name):
    second = SECOND.get(name.rpartition(".")[2])
    try:
        most = len(inspect.signature(FACE[name]).parameters)
    except ValueError:
        most = 2
    if most == 0:
        return
    for what, given in WRONG.items():
        message = None
        try:
            FACE[name](given) if second is None else FACE[name](given, second)
        except (ValueError, TypeError, NotImplementedError) as error:
            message = str(error)
        assert message != "", what
        assert message is None or not RAW.search(message), f"{what}: {message}"


def _text(node: ast.expr) -> str:
    """The literal parts of a message, and its placeholders in braces."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_text, node.values))
    if isinstance(node, ast.FormattedValue):
        return f"{{{ast.unparse(node.value)}}}"
    if isinstance(node, ast.BinOp):
        return _text(node.left) + _text(node.right)
    return ""


@functools.cache
def _raises():
    return tuple(
        (f"{path.relative_to(ROOT)}:{node.lineno}", _text(node.exc.args[0]))
        for path in sorted(ROOT.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args
    )


def test_articles_go_with_the_name_that_follows():
    """The class of what was given by `name_type`, as it may begin with a vowel."""
    wrong = [place for place, text in _raises() if re.search(r"\ban? \{type\(\w+(\.\w+)*\)\.__name__\}", text)]
    assert not wrong


def test_lists_of_names_are_words():
    """By `listed` or `differences`: nobody reads "lacks [] and has unknown ['a']"."""
    wrong = [place for place, text in _raises() if re.search(r"\{(missing|foreign|unknown|lacking)(\[:\d+\])?\}", text)]
    assert not wrong


def test_messages_are_one_line_without_double_spaces_or_words():
    def is_wrong(text):
        ends = text.removesuffix("...").endswith((".", "!", ","))
        return ends or "  " in text or text != text.strip() or re.search(r"\b(\w+) \1\b", text)

    wrong = [(place, text) for place, text in _raises() if is_wrong(text)]
    # torch's own words, which callers look for; code that goes on is no end of a sentence.
    known = ("step() has already been called since the last update().",)
    assert not [found for found in wrong if found[1] not in known]
