"""Which results of an ATen operator are newly computed numbers, read from its schema."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch

# Outputs other than the first that only the backward pass reads: they are inside the operator, in float32.
_STATISTICS = {
    "native_layer_norm": (1, 2),
    "native_group_norm": (1, 2),
    "native_batch_norm": (1, 2),
    "_native_batch_norm_legit": (1, 2),
    "_batch_norm_with_update": (1, 2),
    "cudnn_batch_norm": (1, 2),
    "miopen_batch_norm": (1, 2),
    "_fused_rms_norm": (1,),
    "_weight_norm_interface": (1,),
    "nll_loss_forward": (1,),
    "nll_loss2d_forward": (1,),
    "_ctc_loss": (1,),
    "_cudnn_ctc_loss": (1,),
    "_thnn_fused_lstm_cell": (2,),
    "_thnn_fused_gru_cell": (1,),
    "_scaled_dot_product_flash_attention": (1, 8),
    "_scaled_dot_product_flash_attention_for_cpu": (1,),
    "_scaled_dot_product_efficient_attention": (1,),
    "_scaled_dot_product_cudnn_attention": (1, 8),
    "_scaled_dot_product_fused_attention_overrideable": (1, 8),
    "_flash_attention_forward": (1, 4),
    "_efficient_attention_forward": (1,),
    "_cudnn_attention_forward": (1, 8),
}
# Arguments that are written although the schema does not say so.
_RUNNING = dict.fromkeys(("native_batch_norm", "miopen_batch_norm"), ((3, "running_mean"), (4, "running_var")))
_RUNNING["cudnn_batch_norm"] = _RUNNING["native_batch_norm"]
# A view although the schema does not say so, and memory without numbers.
_NOTHING_NEW = frozenset(
    ("_unsafe_view", "empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided")
) | {"resize_", "resize_as_", "set_"}


class Results(NamedTuple):
    """Which results of an operator are new, written into an argument, or kept for backward.

    Attributes:
        name: such as "aten.addmm".
        fresh: positions of returned tensors (or lists of tensors) in new memory that are to be rounded.
        written: position and name of each argument that is written.
        kept: how many returned statistics stay in float32.
        aliases_caller: whether it hands out memory that Python's caller may own, which must not be written.
    """

    name: str
    fresh: tuple[int, ...]
    written: tuple[tuple[int, str], ...]
    kept: int
    aliases_caller: bool


@cache
def read_results(operator: torch._ops.OpOverload) -> Results:
    """Return an operator's results by its schema, with exceptions that schemas do not tell.

    >>> read_results(torch.ops.aten.addmm.default)
    Results(name='aten.addmm', fresh=(0,), written=(), kept=0, aliases_caller=False)
    >>> read_results(torch.ops.aten.relu_.default).written
    ((0, 'self'),)
    >>> read_results(torch.ops.aten.transpose.int).fresh
    ()
    >>> read_results(torch.ops.aten.native_layer_norm.default).kept
    2
    """
    schema = operator._schema
    namespace, _, base = schema.name.partition("::")
    name = f"{namespace}.{base}"
    if namespace == "aten" and base in _NOTHING_NEW:
        return Results(name, (), (), 0, False)
    known = namespace == "aten"
    kept = _STATISTICS.get(base, ()) if known else ()
    fresh = tuple(i for i, value in enumerate(schema.returns) if value.alias_info is None and _has_tensors(value.type))
    written = tuple(
        (i, argument.name)
        for i, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    aliases_caller = known and base == "lift_fresh"
    return Results(
        name,
        (0,) if aliases_caller else tuple(i for i in fresh if i not in kept),
        written or (_RUNNING.get(base, ()) if known else ()),
        len([i for i in kept if i in fresh]),
        aliases_caller,
    )


def _has_tensors(kind) -> bool:
    return "Tensor" in str(kind)
