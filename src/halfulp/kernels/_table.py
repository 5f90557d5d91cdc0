"""What a device function reads and writes in a table of pointers, a chunk of neighbours at a time."""

from __future__ import annotations

from dataclasses import dataclass

from ._trace import Piece, Trace

# Columns of a chunk: row of the pointers, first element, elements, global index of the first.
CHUNK = 4
# Bytes, those of the widest vector: what streams begins at multiples of it.
ALIGNMENT = 64


@dataclass(frozen=True)
class Digest:
    """The digest of an array's bytes: the sum of the terms of its words, the last one filled up with zeros.

    Attributes:
        column: of the array.
        size: bytes of an element.
        term: (a word, its key) -> what it adds; words of 64 bits.
        step: word j has the key (j + 1) step.
    """

    column: int
    size: int
    term: Piece
    step: int


@dataclass(frozen=True)
class Table:
    """A traced device function with the layout of the table of pointers that it reads and writes.

    Attributes:
        trace: what is computed per element, of inputs ("constant", k) and those of `STREAM`.
        columns: of the table of pointers.
        constants: numbers per row, of 32 or 64 bits as the inputs are.
        start: (low and high half of a row's key, global index) -> an element's inputs of `STREAM`; None without draws.
        step: by which the counters of neighbours differ.
        block: elements of a block; None if there are none.
        partial: whether a chunk's last block may be incomplete; then no array has an element per block.
        digest: of an array, after all was written.
        is_far: whether arrays lie in no cache, so that even of a few lines are asked for, further ahead.
        streams: whether what is stored goes past the caches, which then need not read its old contents first. Arrays
            begin at multiples of `ALIGNMENT` bytes, and none is read and stored.
    """

    trace: Trace
    columns: int
    constants: int = 0
    start: Piece | None = None
    step: int = 0
    block: int | None = None
    partial: bool = False
    digest: Digest | None = None
    is_far: bool = False
    streams: bool = False

    @property
    def sums(self) -> int:
        """Columns of the sums of chunks."""
        return max(CHUNK, len(self.trace.sums))

    def key(self) -> str:
        """Return a key of the instructions, which omits the processor and the sources of `kernels`."""
        pieces = [self.start, self.digest and self.digest.term]
        told = [(piece.trace.digest(), piece.results) for piece in pieces if piece]
        digest = self.digest and (self.digest.column, self.digest.size, self.digest.step)
        counts = self.columns, self.constants, self.step, self.block, self.partial, self.is_far, self.streams
        return repr((self.trace.digest(), sorted(self.trace.rare), counts, digest, told))
