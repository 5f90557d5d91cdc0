"""Law: a registry refuses a second entry of one name, and an entry without the words that describe it."""

import dataclasses

import pytest
import torch
from torch.ops import aten

import halfulp as hu
from halfulp._names import read_registered_descriptions
from halfulp.observation.findings import FINDING_KINDS, FindingKind, register_finding
from halfulp.optim._storage import BF16
from halfulp.scaled._registry import FAMILY_BY_NAME, Family, register_family
from halfulp.trials.tasks import names as task_names


def weight_update(name, words):
    body = {"name": name, "__doc__": words, "__annotations__": {}}
    hu.optim.register_weight_update(dataclasses.dataclass(frozen=True)(type("Mine", (hu.optim.WeightUpdate,), body))())


def optimizer(name, words):
    body = {"__doc__": words, "rule": lambda self, group: hu.optim.SGD.rule(self, group)}
    hu.optim.register_optimizer(type(name, (hu.optim.Optimizer,), body))


def policy(name, words):
    type("Mine", (hu.gradients.Amax,), {"name": name, "__doc__": words})


def task(name, words):
    body = {"name": name, "title": words, "rule": "SGD", "hyper": {}, "steps": 1, "batch": 1}
    mine = type("Mine", (hu.trials.tasks.Task,), body)
    mine.__abstractmethods__ = frozenset()
    hu.trials.tasks.register(mine)


def finding(name, words):
    register_finding(type("Mine", (FindingKind,), {"code": name, "cure": "none", "__doc__": words}))


def form(name, words):
    """A format's fields are its words."""
    hu.formats.register(hu.Format(name, exponent_bits=3, mantissa_bits=9))


def block_format(name, words):
    hu.formats.register(
        hu.BlockFormat(name, element=hu.formats.get("e2m1fn"), scale=hu.formats.get("e8m0fnu"), block=8)
    )


def recipe(name, words):
    hu.recipes.register(hu.Recipe(name=name, description=words))


def rounding(name, words):
    body = {"name": name, "__doc__": words, "goes_away": staticmethod(lambda fraction, half, odd, negative: odd)}
    hu.rounding.register_rounding(type("Mine", (hu.rounding.Rounding,), body))


def state_store(name, words):
    hu.optim.register_state_store(dataclasses.replace(BF16, name=name, dtype=torch.int16), words)


# Kind: what registers an entry of a name with words, a name that is taken, and the names that there are.
KIND = {
    "format": (form, "e5m2", hu.formats.names),
    "block format": (block_format, "mxfp8_e4m3", hu.formats.block_names),
    "weight update": (weight_update, "kahan", lambda: read_registered_descriptions("weight update")),
    "optimizer": (optimizer, "AdamW", lambda: hu.optim.OPTIMIZERS),
    "policy": (policy, "dynamic", lambda: read_registered_descriptions("policy")),
    "recipe": (
        lambda name, words: hu.recipes.register(hu.Recipe(name=name, description=words)),
        "fp32",
        hu.recipes.names,
    ),
    "task": (task, "digits", task_names),
    "finding": (finding, "updates-lost", lambda: FINDING_KINDS),
    "rounding": (rounding, "nearest", hu.rounding.rounding_names),
    "state store": (state_store, "8bit", lambda: ["8bit", *read_registered_descriptions("state store")]),
    "family": (lambda name, words: register_family(Family(name, words or "", "s")), "bilinear", lambda: FAMILY_BY_NAME),
}
SAYS_WHAT_IT_IS = ("format", "block format")


@pytest.mark.parametrize("kind", KIND)
def test_a_second_entry_of_a_name_is_refused(kind):
    register, taken, names = KIND[kind]
    before = list(names())
    assert taken in before
    with pytest.raises(ValueError, match="already"):
        register(taken, "something else")
    assert list(names()) == before


@pytest.mark.parametrize("words", [None, "", " \n"])
@pytest.mark.parametrize("kind", [kind for kind in KIND if kind not in SAYS_WHAT_IT_IS])
def test_an_entry_without_words_is_refused(kind, words):
    register, _, names = KIND[kind]
    before = list(names())
    with pytest.raises(ValueError, match="words"):
        register("nameless" if kind != "optimizer" else "Nameless", words)
    assert list(names()) == before


@pytest.mark.parametrize("implements", [hu.ScaledTensor.implements, hu.MCTensor.implements])
def test_a_second_rule_of_an_operator_is_refused(implements):
    with pytest.raises(ValueError, match="already"):
        implements(aten.mm.default)(lambda a, b: torch.mm(a, b))
