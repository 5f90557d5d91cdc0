"""Tasks by name: their data, and what is said where data or a name is missing."""

from pathlib import Path
from pydoc_data import topics

import pytest
import torch

from halfulp.trials import tasks


def test_batches_cover_an_epoch() -> None:
    task = tasks.get("digits")
    data = task.load()
    seen = torch.cat([inputs for inputs, _ in task.batches(data, 0, 45)])
    assert len(seen) == 1440
    assert len(torch.unique(seen[:1437], dim=0)) == len(torch.unique(data.train[0], dim=0))


def test_windows_do_not_leak() -> None:
    data = tasks.get("text").load()
    inputs, targets = data.validation
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    (batch,) = tasks.get("text").batches(data, 0, 1)
    assert torch.equal(batch[0][:, 1:], batch[1][:, :-1])
    text = "\n".join(topics.topics.values())  # another length in each version of Python
    alphabet, read = sorted(set(text)), torch.cat([data.train[0], data.train[1][-1:], inputs.flatten()])
    assert len(text) - 2 * 64 < len(read) <= len(text)
    assert "".join(alphabet[index] for index in read.tolist()) == text[: len(read)]


@pytest.mark.parametrize("name", ["cifar10", "tinyshakespeare"])
def test_missing_data_says_how_to_get_it(name: str, tmp_path: Path) -> None:
    for given in (None, str(tmp_path)):
        with pytest.raises(ValueError, match=r"https://|Hugging Face") as caught:
            tasks.get(name, given)
        assert "--data" in str(caught.value) or str(tmp_path) in str(caught.value)


def test_unknown_task() -> None:
    with pytest.raises(ValueError, match="did you mean 'digits'"):
        tasks.get("digit")
