"""Gradients that processes send each other in bfloat16, with what rounding loses kept for the next step."""

from __future__ import annotations

import functools
import typing
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch import distributed as dist

from .._messages import name_type, write_differing_names
from .._torch_versions import ALL_GATHER_FUNCTION
from ..subclass.models._conversion import check_is_module

STATE_VERSION = 1
_SENT_DTYPE, _SUM_DTYPE = torch.bfloat16, torch.float32
_GRADIENT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class NarrowAllReduceState:
    """The state of a narrow reduction, one on each rank; `reduce_in_bfloat16` returns it.

    Attributes:
        group, size: the processes, and how many they are.
        bytes_sent: how many bytes this rank has sent to others so far.
        names: what the state of each parameter is saved under.
    """

    def __init__(self, scaler: Any, group: Any, names: dict[Any, str]) -> None:
        self.bytes_sent: int = 0
        self.names: dict[Any, str] = names
        self.group: Any = group
        self.size: int = dist.get_world_size(group)
        self._scaler, self._rank = scaler, dist.get_rank(group)
        # What rounding has kept back, by parameter: of what this rank sent, and of the sums that it computed for all.
        self._remainders: defaultdict[str, dict[str, Tensor]] = defaultdict(dict)
        self._scale = self._read_scaler_scale()

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state, under a key with its rank: every rank saves its own, in a file or by DCP."""
        held = {name: dict(remainders) for name, remainders in self._remainders.items()}
        head = {"version": STATE_VERSION, "ranks": self.size, "scale": self._scale}
        return {**head, f"rank_{self._rank}": held}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what this rank's `state_dict` returned: the training goes on with the bits of an uninterrupted one.

        Raises:
            ValueError: the state of another rank, number of ranks, version or model; nothing is changed.
        """
        mine = f"rank_{self._rank}"
        if (state_dict.get("version"), state_dict.get("ranks")) != (STATE_VERSION, self.size) or mine not in state_dict:
            raise ValueError(
                f"this is not the state of {mine} of {self.size} under version {STATE_VERSION} of reduce_in_bfloat16, "
                f"its keys are {', '.join(map(str, state_dict))}: each rank loads its own. Else leave it out: what is "
                "lost is half an ulp of one step's gradients"
            )
        unknown = [name for name in state_dict[mine] if name not in self.names.values()]
        if unknown:
            raise ValueError(f"the state is of another model: it {write_differing_names([], unknown)}")
        numbers = {name: parameter.numel() for parameter, name in self.names.items()}
        for name, held in state_dict[mine].items():
            sizes = {"sent": numbers[name], "summed": -(-numbers[name] // self.size)}
            if any(owed.numel() != sizes[part] for part, owed in held.items()):
                raise ValueError(f"the state is of another model, whose {name!r} has another size: load this model's")
        devices = {name: parameter.device for parameter, name in self.names.items()}
        copied = {
            name: {part: owed.to(devices[name], copy=True) for part, owed in held.items()}
            for name, held in state_dict[mine].items()
        }
        self._remainders, self._scale = defaultdict(dict, copied), state_dict["scale"]

    def average_bucket(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Average a bucket of DistributedDataParallel's over the ranks, in place."""
        finished: torch.futures.Future[Tensor] = torch.futures.Future()
        if bucket.buffer().is_sparse:
            raise NotImplementedError("sparse gradients are not sent in bfloat16: make the embedding with sparse=False")
        if self.size > 1:
            scale = self._read_scaler_scale()
            if scale != self._scale:
                # The remainders are kept in units of the gradients that arrive.
                ratio, self._scale = scale / self._scale, scale
                for remainders in self._remainders.values():
                    for owed in remainders.values():
                        owed.mul_(ratio)
            names = [self.names[parameter] for parameter in bucket.parameters()]
            gradients = bucket.gradients()
            sent = [
                self._round_with_feedback(name, "sent", gradient.reshape(-1))
                for name, gradient in zip(names, gradients)
            ]
            # A row for each rank, padded with zeros.
            rows = [nn.functional.pad(one, (0, -one.numel() % self.size)).view(self.size, -1) for one in sent]
            widths = [row.shape[1] for row in rows]
            mean = self._exchange_and_sum_rows(torch.cat(rows, 1)) / self.size
            mine = [self._round_with_feedback(name, "summed", part) for name, part in zip(names, mean.split(widths))]
            for gradient, part in zip(gradients, self._gather_rows(torch.cat(mine)).split(widths, 1)):
                gradient.copy_(part.reshape(-1)[: gradient.numel()].view_as(gradient))
        finished.set_result(bucket.buffer())
        return finished

    def _round_with_feedback(self, name: str, part: Literal["sent", "summed"], given: Tensor) -> Tensor:
        """Round a flat tensor to bfloat16, and keep back what is lost."""
        remainders = self._remainders[name]
        if given.dtype == _SENT_DTYPE:
            return given
        if given.dtype not in _GRADIENT_DTYPES:
            raise NotImplementedError(f"{name}: a gradient of {given.dtype}: {_SENT_DTYPE} would lose most of it")
        owed = remainders.get(part)
        whole = given.to(_SUM_DTYPE) if owed is None else given.to(_SUM_DTYPE) + owed
        payload = whole.to(_SENT_DTYPE)
        lost = whole - payload.to(_SUM_DTYPE)
        # An overflow is seen by whoever skips the step, and is not owed for ever.
        remainders[part] = torch.where(lost.isfinite(), lost, 0.0)
        return payload

    def _exchange_and_sum_rows(self, rows: Tensor) -> Tensor:
        """Send row k to rank k; return the float32 sum of the rows received, in the order of ranks."""
        # As bytes: gloo has no bfloat16 everywhere, and nothing is added on the wire.
        sent = rows.contiguous().view(torch.uint8)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        self.bytes_sent += sent.numel() - sent.numel() // self.size
        return functools.reduce(torch.add, received.view(_SENT_DTYPE).to(_SUM_DTYPE).unbind())

    def _gather_rows(self, mine: Tensor) -> Tensor:
        """Return every rank's row."""
        sent = mine.view(torch.uint8)
        received = torch.empty(self.size * sent.numel(), dtype=torch.uint8, device=sent.device)
        ALL_GATHER_FUNCTION(received, sent, group=self.group)
        self.bytes_sent += sent.numel() * (self.size - 1)
        return received.view(_SENT_DTYPE).view(self.size, -1)

    def _read_scaler_scale(self) -> float:
        if self._scaler is None:
            return 1.0
        # An AdaptiveGradScaler takes `get_scale` for a sign that gradients are set by hand.
        return float(getattr(self._scaler, "_compute_global_scale", self._scaler.get_scale)())


if dist.is_available():
    # torch compares annotations, and knows no strings.
    NarrowAllReduceState.average_bucket.__annotations__ = typing.get_type_hints(NarrowAllReduceState.average_bucket)


def reduce_in_bfloat16(model: nn.Module, *, scaler: Any = None) -> NarrowAllReduceState:
    """Send gradients between processes in bfloat16, half the bytes of float32, and lose nothing over the steps.

    Each of n ranks sends its rounded gradient in parts, one to each rank, which sums that part of all in float32; the
    means are rounded once more and sent to all. Whoever rounds adds what it lost to what it rounds next:

        c_i = bf16(g_i + e_i),           e_i <- g_i + e_i - c_i          on every rank i
        a   = bf16(sum_i c_i / n + E),   E   <- sum_i c_i / n + E - a    on the rank that sums the element

    so that over the steps the sum of all a is that of all mean gradients, less what is owed at the end: at most half
    an ulp of one gradient for each rounding. Adding bfloat16 numbers on the wire, as torch's `bf16_compress_hook` does,
    rounds at each addition, which no rank can feed back. All ranks get the same bits. Source: Seide et al., "1-bit
    stochastic gradient descent", Interspeech 2014; Karimireddy et al., "Error feedback fixes SignSGD", ICML 2019; of
    both roundings: Tang et al., "DoubleSqueeze", ICML 2019.

    Feedback holds 4 bytes per element of gradients on each rank, and 4 / n more. A
    gradient is sent when the reducer has it, and backward goes on afterwards. What is not finite is sent, and not owed.

    Args:
        model: a DistributedDataParallel.
        scaler: the gradients' GradScaler or AdaptiveGradScaler, whose scale is the unit of what is owed.

    Returns:
        The state: save its `state_dict()` on every rank, and load each rank's own.

    Raises:
        TypeError: no module, or no scaler.
        ValueError: a model in no such wrapper, or a second communication hook.
        NotImplementedError: parameters with several parts (scaled, multi-component).

    >>> reduce_in_bfloat16(torch.nn.Linear(4, 2))
    Traceback (most recent call last):
    ...
    ValueError: reduce_in_bfloat16 takes a DistributedDataParallel, got a Linear: wrap it, or ...
    """
    check_is_module(model, "reduce_in_bfloat16")
    if scaler is not None and not hasattr(scaler, "get_scale"):
        raise TypeError(
            f"scaler= takes the GradScaler or AdaptiveGradScaler of these gradients, got {name_type(scaler)}"
        )
    if not isinstance(model, nn.parallel.DistributedDataParallel):
        raise ValueError(
            f"reduce_in_bfloat16 takes a DistributedDataParallel, got {name_type(model)}: wrap it, or let fully_shard "
            "reduce by MixedPrecisionPolicy(reduce_dtype=torch.bfloat16), without error feedback"
        )
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "decode"):
            raise NotImplementedError(
                f"parameter {name!r} is {name_type(parameter)}, whose gradients have several parts: "
                "hu.scaled.payload_hook sends those of scaled parameters in float16"
            )
    if getattr(model, "_comm_hooks", None):
        raise ValueError("this DistributedDataParallel has a communication hook, and takes no second one")
    names = {parameter: name for name, parameter in model.module.named_parameters()}
    reduction = NarrowAllReduceState(scaler, model.process_group, names)
    model.register_comm_hook(reduction, NarrowAllReduceState.average_bucket)
    return reduction
