"""What decides the results on each task, in a few numbers; data that tasks read from files are made up."""

import io
import json
import math
import random
import wave
from pathlib import Path
from pydoc_data import topics
from typing import Any
from unittest import mock

import torch

from halfulp import recipes
from halfulp.trials import tasks

from ...records import fingerprint

SEED = 3
WORDS = ("film", "good", "bad", "a", "the", "not", "very", "long", "of", "and", "dull", "bright")


def write_data(root: Path) -> None:
    """Write small files of every data set, in the schema of the real ones."""
    draw = random.Random(7)
    _write_images(root / "cifar10", draw)
    _write_recordings(root / "fsdd", draw)
    _write_ratings(root / "ml100k", draw)
    for name, count in (("train", 90), ("validation", 30)):
        sentences = [" ".join(draw.choices(WORDS, k=draw.randint(2, 40))) for _ in range(count)]
        _write_table(root / "sst2" / f"{name}.parquet", sentence=sentences, label=draw.choices((0, 1), k=count))
    (root / "tinyshakespeare").mkdir()
    (root / "tinyshakespeare" / "input.txt").write_text(make_text(draw))
    # The closure of a binary tree.
    edges = [(f"n{node}", f"n{above}") for node in range(1, 63) for above in _list_ancestors(node)]
    first, second = zip(*edges)
    _write_table(root / "wordnet_mammals" / "closure.parquet", id1=first, id2=second, weight=["1"] * len(edges))


def make_text(draw: random.Random) -> str:
    return "".join(draw.choices("abcdefgh ,.\n", k=6000))


def describe(name: str, root: Path) -> dict[str, Any]:
    """What decides the results on a task: its settings, and fingerprints of data, model, batches and losses.

    By how exactly it is the same on every processor: "exact", "computed" in float32, and "gradients", which an
    activation that is 0 but for a last bit lets through on one and not on another.
    """
    text = {"help": make_text(random.Random(8))}
    with mock.patch.object(topics, "topics", text):  # which differ from Python to Python
        task = tasks.get(name, str(root))
        data = task.load()
    torch.manual_seed(0)
    model = task.model(data, SEED)
    settings = {key: value for key, value in task.settings().items() if key not in ("data", "title")}
    exact: dict[str, Any] = {"settings": json.loads(json.dumps(settings)), "steps": task.steps}
    exact["rates"] = [task.lr_factor(step, 1000) for step in (0, 10, 19, 20, 60, 500, 999)]
    computed: dict[str, Any] = {key: fingerprint(parameter) for key, parameter in model.named_parameters()}
    described = {"exact": exact, "computed": computed}
    parts = {"train": data.train, "validation": data.validation}
    if hasattr(task, "trial"):  # which trains by itself
        course = task.trial(recipes.get("fp64"), SEED, 60, data)
        computed |= {key: course[key] for key in ("curve", "own", "parameters", "targets", "map", "mean_rank")}
        exact |= {key: [fingerprint(part) for part in pair] for key, pair in parts.items()}
        return described
    if data.train[0].dtype == torch.float64:
        model.double()
    batches = [batch for batch, _ in zip(task.batches(data, SEED, 4), range(4))]
    for key, pair in {**parts, **{f"batch {k}": batch for k, batch in enumerate(batches)}}.items():
        # Spectra and pages are computed in float32.
        (computed if name in ("fsdd", "two-heads") else exact)[f"{key} inputs"] = fingerprint(pair[0])
        exact[f"{key} targets"] = fingerprint(pair[1])
    inputs, targets = batches[1]
    outputs = task.outputs(model, inputs)
    loss = task.loss(outputs, targets)
    loss.backward()
    computed["outputs"] = [fingerprint(part) for part in (outputs if isinstance(outputs, tuple) else (outputs,))]
    computed |= {"loss": loss.item(), "judged": task.compute_judged_loss(outputs, targets).item()}
    computed["hits"] = fingerprint(task.is_hit(outputs, targets).sum())
    exact["count"] = task.count_judged(targets)
    gradients = {key: fingerprint(parameter.grad) for key, parameter in model.named_parameters()}
    return {**described, "gradients": gradients}


def _list_ancestors(node: int) -> list[int]:
    above = []
    while node:
        node = (node - 1) // 2
        above.append(node)
    return above


def _write_table(path: Path, **columns: Any) -> None:
    import pyarrow as pa
    import pyarrow.parquet as parquet

    path.parent.mkdir(exist_ok=True)
    parquet.write_table(pa.table({name: list(column) for name, column in columns.items()}), path)


def _write_images(folder: Path, draw: random.Random) -> None:
    from PIL import Image

    for name, count in (("train", 70), ("test", 20)):
        pictures = []
        for _ in range(count):
            file = io.BytesIO()
            Image.frombytes("RGB", (32, 32), draw.randbytes(32 * 32 * 3)).save(file, "PNG")
            pictures.append({"bytes": file.getvalue()})
        _write_table(folder / f"{name}.parquet", img=pictures, label=[draw.randrange(10) for _ in range(count)])


def _write_recordings(folder: Path, draw: random.Random) -> None:
    for name, count in (("train", 40), ("test", 10)):
        recordings = []
        for _ in range(count):
            length, tone = draw.randint(2000, 6000), draw.uniform(200, 3500)
            wave_form = (round(9000 * math.sin(2 * math.pi * tone * k / 8000)) for k in range(length))
            file = io.BytesIO()
            with wave.open(file, "wb") as written:
                written.setnchannels(1)
                written.setsampwidth(2)
                written.setframerate(8000)
                written.writeframes(b"".join(value.to_bytes(2, "little", signed=True) for value in wave_form))
            recordings.append({"bytes": file.getvalue()})
        _write_table(folder / f"{name}.parquet", audio=recordings, label=[draw.randrange(10) for _ in range(count)])


def _write_ratings(folder: Path, draw: random.Random) -> None:
    work, people, films = ("artist", "doctor", "writer"), range(1, 31), range(1, 41)
    ages, genders, jobs = (draw.choices(choice, k=30) for choice in (range(12, 80), "MF", work))
    _write_table(folder / "users.parquet", user_id=people, age=ages, gender=genders, occupation=jobs)
    titles = [f"Film {number} ({draw.randint(1930, 1998)})" if number % 7 else "unknown" for number in films]
    genres = [[draw.randrange(2) for _ in range(19)] for _ in films]
    _write_table(folder / "items.parquet", item_id=films, title=titles, genres=genres)
    who, what, stars = (draw.choices(choice, k=400) for choice in (people, films, range(1, 6)))
    _write_table(folder / "ratings.parquet", user_id=who, item_id=what, rating=stars)
