"""halfulp warm: what it runs, that a training then compiles nothing, and where it has nothing to do."""

import json
from pathlib import Path

import pytest

from halfulp import optim, recipes
from halfulp.cli import _warm, main

WARM = """
import sys
from halfulp.cli import main
main(["warm", "--recipe", "bf16-kahan", "--optimizer", "AdamW", "--json"])
"""
STEP = """
import torch, halfulp as hu
from halfulp.kernels.vector._machine_function import kernel_cache_counts
model = hu.convert(torch.nn.Linear(512, 3), "bf16-kahan")
optimizer = hu.recipes.optimizer(model, "AdamW", lr=0.1)
for _ in range(2):
    model(torch.ones(1, 512)).float().sum().backward()
    optimizer.step()
assert kernel_cache_counts["found"] and not kernel_cache_counts["compiled"], kernel_cache_counts
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HALFULP_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_every_narrow_recipe_is_run_under_every_optimizer(cache, capsys, monkeypatch) -> None:
    pairs, narrow = [], [name for name in recipes.names() if recipes.get(name).is_narrow]
    monkeypatch.setattr(_warm, "_train_small_model", lambda recipe, rule: pairs.append((recipe.name, rule)))
    with pytest.raises(SystemExit):
        main(["warm"])
    assert sorted(pairs) == sorted((name, rule) for name in narrow for rule in optim.OPTIMIZERS)


def test_a_recipe_under_an_optimizer(cache, capsys) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["warm", "--recipe", "fp16-adaptive", "--optimizer", "SGD", "--json"])
    assert caught.value.code == 0
    made = json.loads(capsys.readouterr().out)
    assert made["compiled"] == made["written"] > 0
    assert made["refused"] == 0


def test_kernels_that_cannot_be_kept_are_an_error(cache, capsys, monkeypatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("halfulp.kernels.vector._machine_function.os.replace", full)
    with pytest.raises(SystemExit) as caught:
        main(["warm", "--recipe", "bf16-kahan", "--optimizer", "Adan"])
    assert caught.value.code != 0
    assert "could not be kept" in capsys.readouterr().err


def test_after_it_a_training_compiles_nothing(cache, in_process) -> None:
    first = json.loads(in_process(WARM))
    assert first["compiled"] == len(list(cache.iterdir())) > 0
    assert sum(path.stat().st_size for path in cache.iterdir()) >= first["bytes"] > 0
    again = json.loads(in_process(WARM, number=1))
    assert (again["compiled"], again["found"], again["bytes"]) == (0, first["compiled"], 0)
    in_process(STEP)


@pytest.mark.parametrize(
    ("options", "environment", "words"),
    [
        (["--recipe", "bf16-khan"], {}, "did you mean 'bf16-kahan'"),
        (["--optimizer", "AdamWW"], {}, "did you mean 'AdamW'"),
        ([], {"HALFULP_ENGINE": "reference"}, "nothing to compile: HALFULP_ENGINE asks for reference"),
        ([], {"HALFULP_CACHE_DIR": "{file}/cache"}, "set HALFULP_CACHE_DIR to a folder that can be written"),
    ],
)
def test_what_cannot_be_done_is_one_line(options, environment, words, cache, tmp_path, monkeypatch, capsys) -> None:
    (tmp_path / "file").write_text("")
    for name, value in environment.items():
        monkeypatch.setenv(name, value.format(file=tmp_path / "file"))
    with pytest.raises(SystemExit) as caught:
        main(["warm", *options])
    said = capsys.readouterr()
    assert (caught.value.code, said.out, said.err.count("\n")) == (2, "", 1)
    assert words in said.err
