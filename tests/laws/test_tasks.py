"""Law: every task is the same for the same seed, with a float32 model and a finite loss that has gradients."""

import io
import pickle
import types
import wave
from pathlib import Path

import pytest
import torch

from halfulp import recipes
from halfulp.trials import tasks
from halfulp.trials.running import _trial
from halfulp.trials.running._plan import Trial
from halfulp.trials.tasks import Task


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small files in the schemas that the tasks read."""
    import pyarrow as pa
    import pyarrow.parquet as parquet
    from PIL import Image

    root = tmp_path_factory.mktemp("data")
    (root / "tinyshakespeare").mkdir()
    (root / "tinyshakespeare" / "input.txt").write_text("To be, or not to be: that is the question.\n" * 50)
    (root / "cifar10").mkdir()
    for part, count in (("train", 130), ("test", 20)):
        images = []
        for index in range(count):
            buffer = io.BytesIO()
            Image.new("RGB", (32, 32), (index, 2 * index % 256, 99)).save(buffer, "PNG")
            images.append({"bytes": buffer.getvalue(), "path": None})
        table = pa.table({"img": images, "label": [index % 10 for index in range(count)]})
        parquet.write_table(table, root / "cifar10" / f"{part}.parquet")
    (root / "wordnet_mammals").mkdir()
    pairs = [(f"n{node}", f"n{(node - 1) // 2}") for node in range(1, 127)]
    below, above = zip(*pairs)
    closure = pa.table({"id1": below, "id2": above, "weight": ["1"] * len(pairs)})
    parquet.write_table(closure, root / "wordnet_mammals" / "closure.parquet")
    _write_table(root / "sst2" / "train.parquet", sentence=["good film", "a bad , bad film"] * 20, label=[1, 0] * 20)
    _write_table(root / "sst2" / "validation.parquet", sentence=["a film", "bad"] * 3, label=[1, 0] * 3)
    recordings = [{"bytes": _recording(number), "path": None} for number in range(40)]
    for part in ("train", "test"):
        _write_table(root / "fsdd" / f"{part}.parquet", audio=recordings, label=[number % 10 for number in range(40)])
    people = {"age": range(20, 30), "gender": ["M", "F"] * 5, "occupation": ["artist", "doctor"] * 5}
    films = {
        "title": [f"Film (19{70 + n})" for n in range(10)],
        "genres": [[int(k == n) for k in range(19)] for n in range(10)],
    }
    _write_table(root / "ml100k" / "users.parquet", user_id=range(1, 11), **people)
    _write_table(root / "ml100k" / "items.parquet", item_id=range(1, 11), **films)
    marks = [(user, item, 1 + (user + item) % 5) for user in range(1, 11) for item in range(1, 11)]
    _write_table(root / "ml100k" / "ratings.parquet", **dict(zip(("user_id", "item_id", "rating"), zip(*marks))))
    return root


def _write_table(path: Path, **columns) -> None:
    import pyarrow as pa
    import pyarrow.parquet as parquet

    path.parent.mkdir(exist_ok=True)
    parquet.write_table(pa.table({name: list(values) for name, values in columns.items()}), path)


def _recording(number: int) -> bytes:
    """A tenth of a second of a tone, 8,000 samples of 16 bits a second."""
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setparams((1, 2, 8000, 0, "NONE", ""))
        time = torch.arange(800) / 8000
        file.writeframes((8000 * (2 * torch.pi * (200 + 50 * number) * time).sin()).to(torch.int16).numpy().tobytes())
    return buffer.getvalue()


@pytest.fixture(params=tasks.names())
def task(request: pytest.FixtureRequest, folder: Path) -> Task:
    return tasks.get(request.param, str(folder))


def test_loss_of_a_batch_is_finite_and_has_gradients(task: Task, seed: int) -> None:
    data = task.load()
    model = task.model(data, seed)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    if hasattr(task, "trial"):
        pytest.skip("it brings its own loop")
    model.to(torch.float64 if data.train[0].dtype == torch.float64 else torch.float32)
    inputs, targets = next(iter(task.batches(data, seed, 1)))
    assert len(inputs) == task.batch
    loss = task.loss(model(inputs), targets)
    loss.backward()
    assert loss.isfinite()
    assert all(parameter.grad is not None for parameter in model.parameters())
    logits, targets = model(data.validation[0][:3]), data.validation[1][:3]
    hits = task.is_hit(logits, targets)
    assert hits.dtype == torch.bool
    assert hits.numel() == task.count_judged(targets)
    assert task.compute_judged_loss(logits, targets).isfinite()


def test_seeds_decide_everything(task: Task, seed: int) -> None:
    data = task.load()

    def trial(number: int) -> list[torch.Tensor]:
        torch.manual_seed(seed + 1000 * number)
        batches = [part for batch in task.batches(data, number, 3) for part in batch]
        return [*batches, *task.model(data, number).state_dict().values()]

    first = trial(1)
    assert all(torch.equal(a, b) for a, b in zip(first, trial(1)))
    assert not all(torch.equal(a, b) for a, b in zip(first, trial(2)))


def test_settings_and_pickle(task: Task) -> None:
    again = pickle.loads(pickle.dumps(task))
    assert again.settings() == task.settings()
    assert task.settings()["name"] == task.name
    assert task.judged_by in ("train_loss", "validation_loss")
    assert all(0 < task.lr_factor(step, task.steps) <= 1 for step in range(task.steps))


def test_a_trial_trains_by_the_tasks_rule_and_hyper_parameters(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    if hasattr(task, "trial"):
        pytest.skip("it brings its own loop")
    made = []

    class Stop(Exception):
        pass

    def optimizer(*arguments, **options):
        made.append(recipes.optimizer(*arguments, **options))
        raise Stop

    monkeypatch.setattr(_trial, "recipes", types.SimpleNamespace(convert=recipes.convert, optimizer=optimizer))
    with pytest.raises(Stop):
        _trial.run_trial(Trial(task, recipes.get("fp32"), 0, 3), task.load())
    (group,) = made[0].param_groups
    assert type(made[0]).__name__ == task.rule
    assert {key: group[key] for key in task.hyper} == task.hyper
