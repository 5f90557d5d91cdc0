"""Exact sums on an accelerator: two Triton launches, of tiles into accumulators and of those into results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...kernels import plain
from ...kernels.triton._launch import on_device, ready
from ...kernels.triton._writer import OPTIONS, load_module
from ._accumulator import LAYOUTS, WORDS
from ._device_code import VECTOR, module_text
from ._reference import round_words, words_of

_TILES = {128: 1, 1024: 4, 4096: 8}  # elements of a tile, and warps
_FEW, _COPIES = 16, 32  # a row of more tiles than a few has so many accumulators, for whose words programs do not queue
_MOST = 1 << 16  # accumulators in memory at a time


class ExactSums:
    """The kernels of exact sums."""

    def __init__(self) -> None:
        names = load_module(module_text())
        self._accumulate: Any = names["accumulate"]
        self._settle: Any = names["settle"]

    def sums(self, a: torch.Tensor, b: torch.Tensor | None, dtype: torch.dtype | None) -> torch.Tensor:
        """The rounded sum of every row of a, or of the products of a and b; without a dtype the accumulators.

        Args:
            a: (rows, columns), the last stride 1.
            b: as a.
            dtype: of the sums.
        """
        rows, columns = a.shape
        copies = _COPIES if columns > _FEW * max(_TILES) else 1
        step = _MOST // copies
        if rows > step:
            parts = [slice(start, start + step) for start in range(0, rows, step)]
            return torch.cat([self.sums(a[part], None if b is None else b[part], dtype) for part in parts])
        words = torch.zeros(rows, copies, WORDS, dtype=torch.int64, device=a.device)
        if rows and columns:
            self._add(words, a, b)
        return self.settled(words, dtype, columns)

    def _add(self, words: torch.Tensor, a: torch.Tensor, b: torch.Tensor | None) -> None:
        (rows, columns), layout = a.shape, LAYOUTS[a.dtype]
        bits = [plain(x).view(layout.word) for x in ((a,) if b is None else (a, b))]
        tile = next((size for size in _TILES if columns <= size), max(_TILES))
        tiles = -(-columns // tile)
        steps = bits[0].stride(0), bits[-1].stride(0)
        with on_device(a.device):
            self._accumulate[(rows * tiles,)](
                bits[0],
                bits[-1],
                words,
                columns,
                *steps,
                tiles,
                words.shape[1],
                layout.mantissa,
                layout.fields,
                layout.least_exponent,
                b is not None,
                not any(number % VECTOR for number in (columns, *steps)),
                tile,
                **OPTIONS | {"num_warps": _TILES[tile]},
            )

    def settled(self, words: torch.Tensor, dtype: torch.dtype | None, terms: int = 0) -> torch.Tensor:
        """Sums of accumulators rounded, or without a dtype with their carries passed on.

        Args:
            words: int64 (rows, accumulators of each, WORDS), without gaps.
            dtype: of the sums.
            terms: how many are to be counted in each row.
        """
        rows, copies, _ = words.shape
        layout = None if dtype is None else LAYOUTS[dtype]
        shape, kind = ((rows, WORDS), torch.int64) if layout is None else ((rows,), layout.word)
        out = torch.empty(shape, dtype=kind, device=words.device)
        given = (0, 0, 0, 0) if layout is None else (layout.width, layout.mantissa, layout.fields, layout.lowest)
        if rows:
            with on_device(words.device):
                self._settle[(rows,)](words, out, terms, *given, copies, **OPTIONS)
        return out if dtype is None else out.view(dtype)


def exact_sums(device: torch.device, dtype: torch.dtype, product: bool, trial: Callable) -> ExactSums | None:
    """Return the kernels, compared with the reference before their first use; None, counted, if they cannot be used.

    Args:
        device: where the elements lie.
        dtype: of the elements.
        product: whether they are multiplied.
        trial: (dtype) -> fixed rows on the CPU.
    """

    def rows() -> tuple[torch.Tensor, torch.Tensor | None]:
        a = trial(dtype)
        return a, a.flip(1).contiguous() if product else None

    def run(kernels: ExactSums, device: torch.device) -> list[torch.Tensor]:
        a, b = rows()
        a, b = a.to(device), None if b is None else b.to(device)
        return [kernels.sums(a, b, kind).cpu() for kind in (None, dtype)]

    def reference() -> list[torch.Tensor]:
        words = words_of(*rows())
        return [words, round_words(words, dtype)]

    name = f"{'exact_dot' if product else 'exact_sum'} ({dtype})"
    kernels: ExactSums | None = ready(("exact sums", dtype, product), name, device, ExactSums, run, reference)
    return kernels
