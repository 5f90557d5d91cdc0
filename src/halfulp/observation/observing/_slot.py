"""Slots: a role at a name, through which hooks hand over one tensor after the other with little of Python between."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable

import torch

from ...kernels import plain_address
from .._record import Role
from ..sampling._kernel import (
    BINS,
    BROKEN,
    COLUMNS,
    COUNT,
    DATA,
    FRESH,
    INFINITE_WORD,
    INTEGERS,
    KERNEL_DTYPES,
    KEY,
    LARGEST_WORD,
    REALS_AT,
    SAMPLE,
)
from ..sampling._sample_places import MOST
from ..sampling._sampler import checked_kernel, constants
from ..sampling._totals import Totals
from ._notebook import Notebook


class TensorSlot:
    """One role at one name.

    Args:
        book: what is written to.
        role, name, kind: as `Notebook.look` takes them.

    Attributes:
        totals: its counts; None before the first look.
    """

    __slots__ = ("_arguments", "_dtype", "_kernel", "_row", "_words", "book", "kind", "name", "role", "totals")

    def __init__(self, book: Notebook, role: Role, name: str, kind: str) -> None:
        self.book, self.role, self.name, self.kind = book, role, name, kind
        self.totals: Totals | None = None
        self._dtype: torch.dtype | None = None
        self._row: int = book.row_of(name)
        self._words: array[int] = array("q", bytes(8 * COLUMNS))  # the kernel's table of one row
        self._arguments: tuple[int, ...] = (self._words.buffer_info()[0], *book.candidates.arguments)
        self._kernel: Callable[..., None] | None = None

    def look_quickly(self, tensor: torch.Tensor, scale: float = 1.0) -> bool:
        """Count a plain tensor of the dtype that was seen last, where no mode of torch watches; False elsewhere.

        No operator of torch runs, so that nothing about gradients, modes and errors has to be arranged.
        """
        book = self.book
        if self._dtype is not tensor.dtype or not book.by_kernel or book.inside or is_watched():
            return False
        begin = time.perf_counter()
        at, totals, row = plain_address(tensor), self.totals, self._words
        if not at or totals is None or self._kernel is None:
            return False
        if totals.step != book.step and totals.opens(book.step):
            row[FRESH], row[KEY] = 1, int(book.keys[self._row])
        row[DATA], row[COUNT] = at, tensor.numel()
        totals.record.scale = scale
        book.inside = True  # the kernel runs without the interpreter's lock, and samples share their room
        self._kernel(0, 1, *self._arguments)
        book.inside = False
        if row[BROKEN]:
            book.note_nonfinite(totals)
        else:
            book.position += 1
        book.seconds += time.perf_counter() - begin
        return True

    def look(self, tensor: torch.Tensor, scale: float = 1.0) -> Totals | None:
        """Count any tensor; None where its numbers cannot be read. Call it as `watching` functions do."""
        book, self._dtype = self.book, None
        self.totals = totals = book.look(self.role, self.name, self.kind, tensor, scale)
        asked = book.quantized is not None and bool(book.quantized.formats)
        if totals is None or asked or not book.by_kernel or tensor.dtype not in KERNEL_DTYPES:
            return totals
        if plain_address(tensor):
            row, places = self._words, (INTEGERS, REALS_AT, LARGEST_WORD, INFINITE_WORD)
            for place, word in zip(places, constants(totals, tensor.dtype, tensor.dtype)):
                row[place] = word
            row[SAMPLE], row[BINS] = book.sampler.scratch, book.sampler.scratch + 4 * MOST
            row[KEY] = int(book.keys[self._row])
            self._kernel, self._dtype = checked_kernel(tensor.dtype), tensor.dtype
        return totals


def is_watched() -> bool:
    """Return whether a mode of torch would see the functions that are called now, or a compiler traces them."""
    modes = torch._C._is_torch_function_mode_enabled() or torch._C._len_torch_dispatch_stack()
    return bool(modes) or torch.compiler.is_compiling()
