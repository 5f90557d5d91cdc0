"""Task ml100k: which films a person likes, by embeddings and their products."""

import re
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ._files import TaskWithDataFiles, decode_file_content, read_parquet
from ._task import Data, compute_task_warm_cosine_factor

_GENRE_COUNT = 19
LEAST_LIKED_STARS = 4  # of five stars


class MovieLens(TaskWithDataFiles):
    """Prediction of whether a rating on MovieLens is four stars or more, by a network of DLRM's kind; needs ``data``.

    "Revisiting BFloat16 Training" (arXiv 2010.06192) trains DLRM (Naumov et al., arXiv 1906.00091) on clicks with
    plain SGD; this is its kind at a size for two cores: embeddings of what has no order, a network for what has, the
    products of all pairs, and a network on top.
    """

    name: ClassVar[str] = "ml100k"
    title: ClassVar[str] = "ranking network of DLRM's kind on ratings of films"
    rule: ClassVar[str] = "SGD"
    hyper: ClassVar[dict[str, Any]] = {"lr": 0.5, "momentum": 0.9}
    steps: ClassVar[int] = 3000
    batch: ClassVar[int] = 128
    target: ClassVar[str] = "rating"
    lr_factor = compute_task_warm_cosine_factor
    folder: ClassVar[str] = "ml100k"
    files: ClassVar[tuple[str, ...]] = ("ratings.parquet", "users.parquet", "items.parquet")
    how: ClassVar[str] = (
        "They are the tables u.data, u.user and u.item of MovieLens 100K, "
        "https://grouplens.org/datasets/movielens/100k/, "
        "as Parquet (user_id, item_id, rating; user_id, age, gender, occupation; item_id, title, genres)"
    )

    def load(self) -> Data:
        """Load rows of integers: user, film, occupation, gender, age, year and genres, in a fixed split."""
        users, people = _read_numbered_rows(f"{self.data}/users.parquet", ["user_id", "occupation", "gender", "age"])
        items, films = _read_numbered_rows(f"{self.data}/items.parquet", ["item_id", "title", "genres"])
        columns = read_parquet(f"{self.data}/ratings.parquet", ["user_id", "item_id", "rating"])
        names = [sorted({person[place] for person in people}) for place in (1, 2)]

        def encode(rating: tuple[int, int, int]) -> list[int]:
            user, item, stars = rating
            _, occupation, gender, age = people[users[user]]
            _, title, genres = films[items[item]]
            sorts = [names[0].index(occupation), names[1].index(gender)]
            return [
                users[user],
                items[item],
                *sorts,
                age,
                _parse_title_year(title),
                *genres,
                int(stars >= LEAST_LIKED_STARS),
            ]

        path = f"{self.data}/ratings.parquet"
        rows = [
            decode_file_content(f"row {number} of {path}", encode, rating)
            for number, rating in enumerate(zip(*columns))
        ]
        whole = torch.tensor(rows, dtype=torch.int64, device="cpu")
        generator = torch.Generator().manual_seed(0)
        whole = whole[torch.randperm(len(whole), generator=generator, dtype=torch.int64, device="cpu")]
        split = len(whole) * 9 // 10
        note = f"MovieLens 100K: {split:,} ratings to train on, {len(whole) - split:,} to validate"
        train, validation = ((part[:, :-1], part[:, -1]) for part in (whole[:split], whole[split:]))
        return Data(train=train, validation=validation, note=note)

    def model(self, data: Data, seed: int) -> nn.Module:
        """Build embeddings of sixteen numbers for everything."""
        torch.manual_seed(seed)
        largest = torch.cat([data.train[0], data.validation[0]])[:, :4].amax(0)
        return RankingNetwork([1 + int(number) for number in largest])


class RankingNetwork(nn.Module):
    """A ranking network from rows of whole numbers (batch, 6 + genres) to logits (batch, 2)."""

    def __init__(self, tables: list[int], width: int = 16):
        super().__init__()
        vectors = [nn.Embedding(size, width) for size in tables]
        for table in vectors:
            nn.init.normal_(table.weight, std=0.1)
        self.tables = nn.ModuleList(vectors)
        self.below = nn.Sequential(nn.Linear(2 + _GENRE_COUNT, 32), nn.ReLU(), nn.Linear(32, width), nn.ReLU())
        pairs = (1 + len(tables)) * len(tables) // 2
        self.above = nn.Sequential(nn.Linear(width + pairs, 64), nn.ReLU(), nn.Linear(64, 2))

    def forward(self, rows: Tensor) -> Tensor:
        """Return the logits of int64 rows, as `MovieLens.load` makes them."""
        age, year, genres = rows[:, 4:5] / 50 - 1, (rows[:, 5:6] - 1980) / 20, rows[:, 6:]
        known = self.below(torch.cat([age, year, genres], 1).to(next(self.below.parameters()).dtype))
        vectors = torch.stack([known, *(table(rows[:, place]) for place, table in enumerate(self.tables))], 1)
        products = vectors @ vectors.transpose(1, 2)
        first, second = torch.triu_indices(vectors.shape[1], vectors.shape[1], 1, dtype=torch.int64, device=rows.device)
        return self.above(torch.cat([known, products[:, first, second]], 1))


def _read_numbered_rows(path: str, columns: list[str]) -> tuple[dict[int, int], list[tuple[Any, ...]]]:
    """Return the rows of a table, and the place of each by the number in its first column."""
    rows = list(zip(*read_parquet(path, columns)))
    return {row[0]: place for place, row in enumerate(rows)}, rows


def _parse_title_year(title: str) -> int:
    """Return the year at the end of a film's title, 1980 where there is none.

    >>> _parse_title_year("Toy Story (1995)"), _parse_title_year("unknown")
    (1995, 1980)
    """
    found = re.search(r"\((\d{4})\)\s*$", title or "")
    return int(found[1]) if found else 1980
