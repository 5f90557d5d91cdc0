"""The input of a running step: tables that stay as long as their plans do, and gradients and constants."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import is_
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ...kernels import chunk_table, plain
from ...kernels.vector._machine_function import address_of
from ..parameters._local_tensors import local, own_parts
from ..parameters._outside_writes import drop_stale, follow_version, mark_stepped
from ..parameters._parameter_plan import ParameterPlan, ParameterRecord, PayloadVersion
from ..parameters._payload_digests import PayloadDigests
from ..parameters._step_spec import StepSpec

if TYPE_CHECKING:
    from ._triton_launch import DeviceChunks


@dataclass(eq=False, slots=True)
class Table:
    """The tables of a batch's kernel, rebuilt only if one of the batch's plans changes.

    Attributes:
        plans: of the batch, in order.
        chunks: int64 array of shape (chunks, 4).
        pointers: int64 array of shape (parameters, pointers); the gradients' column is written at each step.
        digests: of the payloads, as the last step of these plans has written them here, where it computes them.
        rows: zeros, the row of the constants of each parameter where all have the same.
        identities: uint64 array of shape (parameters, 1).
        seeds: of the random bits: one for all, or a uint64 array of shape (parameters, 1).
        keys: uint64 array of shape (parameters, 1), or (parameters, 0) without draws, written at each step.
        lengths: of the chunks.
        addresses_of: the addresses of chunks, pointers, rows of the constants where all have the same, keys, digests.
        entries: of the optimizer's state, by parameter.
        stored: the name of each tensor there, those of all parameters, and their addresses.
        records: of those parameters whose writes are tracked.
        shapes, addresses: of the parameters' memory.
        has_gaps: the rows of the parameters whose memory has some.
        is_plain: whether all parameters are plain tensors.
        device_chunks: the copy of the chunks on an accelerator.
    """

    plans: list[ParameterPlan]
    chunks: np.ndarray
    pointers: np.ndarray
    digests: PayloadDigests
    identities: np.ndarray
    seeds: int | np.ndarray
    keys: np.ndarray
    lengths: np.ndarray
    rows: np.ndarray
    addresses_of: tuple[int, ...]
    entries: list[dict[str, Any]]
    stored: list[tuple[str, list[torch.Tensor], list[int]]]
    records: list[ParameterRecord]
    shapes: list[tuple[int, ...]]
    addresses: list[int]
    has_gaps: list[int]
    is_plain: bool
    device_chunks: DeviceChunks | None = None

    @classmethod
    def of(cls, plans: list[ParameterPlan]) -> Table:
        """Return the tables of some plans of one step specification."""
        chunks = chunk_table([plan.index_map for plan in plans])
        pointers = np.array([plan.addresses for plan in plans], np.int64)
        ends = np.searchsorted(chunks[:, 0], np.arange(len(plans)), side="right")
        digests = PayloadDigests(np.zeros(len(chunks), np.uint64), ends)
        seeds, rows = {plan.seed for plan in plans}, np.zeros(len(plans), np.int64)
        keys = np.zeros((len(plans), int(plans[0].spec.draws)), np.uint64)
        return cls(
            plans=plans,
            chunks=chunks,
            pointers=pointers,
            digests=digests,
            identities=np.array([[plan.identity] for plan in plans], np.uint64),
            seeds=seeds.pop() if len(seeds) == 1 else np.array([[plan.seed] for plan in plans], np.uint64),
            keys=keys,
            lengths=chunks[:, 2],
            rows=rows,
            addresses_of=tuple(map(address_of, (chunks, pointers, rows, keys, digests.values))),
            entries=[plan.state for plan in plans],
            stored=[
                (name, [plan.stored[k] for plan in plans], [plan.stored_addresses[k] for plan in plans])
                for k, name in enumerate(plans[0].spec.tensors)
            ],
            records=[plan.record for plan in plans if plan.tracks_writes],
            shapes=[plan.shape for plan in plans],
            addresses=[plan.address for plan in plans],
            has_gaps=[row for row, plan in enumerate(plans) if not plan.contiguous],
            is_plain=all(plan.plain for plan in plans),
        )

    def stands(self, parameters: list[torch.Tensor], gradients: list[torch.Tensor]) -> bool:
        """Return whether all plans are valid for the parameters of a step, and their gradients plain memory.

        It is `is_valid` of every plan, column by column, but for what the roster asks once for all. A no says
        nothing: tensor classes and memory with gaps are looked at one by one.

        Args:
            parameters: whose plans these are.
            gradients: theirs.
        """
        spec, tensor = self.plans[0].spec, torch.Tensor
        try:
            return (
                self.is_plain
                and {*map(type, gradients)} == {tensor}
                and all(map(tensor.is_contiguous, gradients))
                and not any(map(tensor.is_neg, gradients))
                and {gradient.dtype for gradient in gradients} == {spec.gradient.dtype}
                and {parameter.dtype for parameter in parameters} == {spec.store.dtype}
                and [gradient.shape for gradient in gradients] == self.shapes
                and [parameter.shape for parameter in parameters] == self.shapes
                and all(map(tensor.is_contiguous, parameters))
                and [*map(tensor.data_ptr, parameters)] == self.addresses
                and all(self._holds(*column) for column in self.stored)
            )
        except RuntimeError:  # a tensor without strides
            return False

    def _holds(self, name: str, held: list[torch.Tensor], addresses: list[int]) -> bool:
        """Return whether the optimizer's state has the tensors of a column where they were."""
        try:
            now = [entry[name] for entry in self.entries]
        except KeyError:
            return False
        return all(map(is_, now, held)) and [*map(torch.Tensor.data_ptr, held)] == addresses


Copies = tuple[torch.Tensor, ...]


@dataclass(eq=False, slots=True)
class Batch:
    """The input of a running step for the parameters of one step specification; it lives as long as the step.

    Columns instead of one object per parameter, of which there may be 100,000.

    Attributes:
        spec: of this step, metered or not.
        table: of the parameters' plans.
        parameters: as the user holds them.
        gradients: their memory, without gaps.
        gradient_scales: what gradients are multiplied by, 1 or a scaled gradient's scale, wherever that lies.
        steps: the numbers of the step, from 1 for each parameter.
        constants: the rule's; equal ones of one group are one object.
        ages: the groups, and the numbers of the step that the rule counts, where it needs them again: its sums give
            the last constants.
        prepared: by row, what the rule's `prepare` gives, if it has one.
        copies: by row, copies without gaps of a parameter's own tensors, where these have some; the step writes to
            the copies, and `finish` copies the values back.
        recorded: the payload versions of those whose writes are tracked.
        engine: which runs the step.
        digests: of the payloads as written, if the step computed them.
        scales: of the payloads as written, on their device, if the step chose them there.
    """

    spec: StepSpec
    table: Table
    parameters: list[torch.Tensor]
    gradients: list[torch.Tensor]
    gradient_scales: list[float | torch.Tensor]
    steps: list[int]
    constants: list[tuple[float, ...]]
    ages: list[tuple[Mapping[str, Any], int]] = field(default_factory=list)
    prepared: list[torch.Tensor] = field(default_factory=list)
    copies: dict[int, Copies] = field(default_factory=dict)
    recorded: list[PayloadVersion] = field(default_factory=list)
    engine: str = ""
    digests: PayloadDigests | None = None
    scales: torch.Tensor | None = None

    def __post_init__(self) -> None:
        records = self.table.records
        self.recorded = [held for record in records if (held := record.payload_version) is not None]
        for row in self.table.has_gaps:
            parts = own_parts(self.parameters[row])
            self.copies[row] = tuple(plain(part.detach()).contiguous() for part in parts)

    @property
    def plans(self) -> list[ParameterPlan]:
        """The plans of the parameters."""
        return self.table.plans

    @property
    def device(self) -> torch.device:
        """The device of the gradients and the parameters."""
        return self.gradients[0].device

    def parts(self, row: int) -> list[torch.Tensor]:
        """Return the tensors that a parameter's step reads and writes: its own without gaps, then auxiliary ones."""
        plan = self.plans[row]
        return [*self.copies[row], *plan.auxiliary_tensors] if row in self.copies else plan.parts

    def states(self, row: int) -> list[list[torch.Tensor]]:
        """Return the tensors of a parameter's states, and what is prepared for its step behind them."""
        return [*self.plans[row].states, *([one] for one in self.prepared[row : row + 1])]

    def drop_stale(self) -> None:
        """Reset the auxiliary tensors of parameters that were written from outside."""
        recorded, parameters = self.recorded, self.parameters
        versions = [held.version for held in recorded]
        if len(versions) == len(parameters) and versions == [parameter._version for parameter in parameters]:
            return
        for plan, parameter in zip(self.plans, parameters) if recorded else ():
            held = plan.payload_version
            if held is not None and held.version != parameter._version:
                drop_stale(plan)

    def finish(self) -> None:
        """Record a step that has been written."""
        stepped = self.parameters
        if not self.table.is_plain and not self.spec.scaled:
            stepped = [local(parameter) for parameter in stepped]
        torch.autograd.graph.increment_version(stepped)
        for row, copies in self.copies.items():
            for part, copy in zip(self.plans[row].payloads, copies, strict=True):
                part.copy_(copy)
        for entry, step in zip(self.table.entries, self.steps):
            entry["step"] = step
        if self.recorded:
            mark_stepped(self.plans, self.recorded, stepped, self.digests, self.scales)

    def follow_versions(self) -> None:
        """Record the versions again, once all batches are written: parameters cut from one tensor share a counter."""
        for plan in self.plans:
            follow_version(plan)
