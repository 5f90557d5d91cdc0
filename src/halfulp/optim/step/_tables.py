"""The tables that a batch of parameters needs in every step, and that stay as long as its plans do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ...kernels import chunk_table
from ..parameters._parameter_plan import ParameterPlan

if TYPE_CHECKING:
    from ._triton_launch import DeviceChunks


@dataclass(eq=False, slots=True)
class Table:
    """The tables of a batch's kernel, rebuilt only if one of the batch's plans changes.

    Attributes:
        plans: of the batch, in order.
        chunks: int64 array of shape (chunks, 4).
        pointers: int64 array of shape (parameters, pointers); the gradients' column is written at each step.
        ends: how many chunks the parameters up to each have.
        keyed: uint64 array of shape (2, parameters): seeds and identities.
        device_chunks: the copy of the chunks on an accelerator.
    """

    plans: list[ParameterPlan]
    chunks: np.ndarray
    pointers: np.ndarray
    ends: np.ndarray
    keyed: np.ndarray
    device_chunks: DeviceChunks | None = None

    @classmethod
    def of(cls, plans: list[ParameterPlan]) -> Table:
        """Return the tables of some plans."""
        chunks = chunk_table([plan.index_map for plan in plans])
        return cls(
            plans,
            chunks,
            np.array([plan.addresses for plan in plans], np.int64),
            np.searchsorted(chunks[:, 0], np.arange(len(plans)), side="right"),
            np.array([[plan.seed for plan in plans], [plan.identity for plan in plans]], np.uint64),
        )
