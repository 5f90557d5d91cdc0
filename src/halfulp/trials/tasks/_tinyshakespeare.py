"""Task tinyshakespeare: the character-level GPT on Shakespeare's plays."""

import dataclasses
from typing import ClassVar

from . import _task as _files
from ._task import Data
from ._text import CharacterGPT, characters

_HOW = (
    "input.txt is the 1.1 MB file of karpathy/char-rnn: "
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
)


@dataclasses.dataclass(frozen=True)
class TinyShakespeare(CharacterGPT):
    """Next-character prediction on ``input.txt`` (1.1 million characters); needs ``data``."""

    data: str | None = None

    name: ClassVar[str] = "tinyshakespeare"
    title: ClassVar[str] = "character-level GPT on Shakespeare"

    def __post_init__(self) -> None:
        object.__setattr__(self, "data", str(_files.find(self.name, self.data, ("input.txt",), _HOW)))

    def load(self) -> Data:
        """The first nine tenths train, the last tenth validates."""
        with open(f"{self.data}/input.txt", encoding="utf-8") as file:
            return characters(file.read(), "tinyshakespeare")
