"""One forward and backward pass of a model, for what compares two."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..kernels import same_bits
from ._record import Recorder, Step, plain, relative

LossOf = Callable[[Any], Tensor]


def _as_it_is(loss: Tensor) -> Tensor:
    return loss


def reference(model: nn.Module, batch: Any, loss_of: LossOf) -> tuple[dict[str, Tensor | None], list[Step]]:
    """The gradients and operators of plain float32, which must be finite to be compared with."""
    loss, gradients, steps = one_step(model, batch, loss_of)
    if not bool(loss.isfinite().all()):
        raise ValueError(f"in plain float32 the loss is {loss.item()}: nothing to compare with; give another batch")
    if all(grad is None for grad in gradients.values()):
        raise ValueError("in plain float32 no parameter has a gradient: give a loss that depends on one that trains")
    for name, grad in gradients.items():
        if grad is not None and not bool(grad.isfinite().all()):
            raise ValueError(
                f"in plain float32 the gradient of {name!r} is not finite: nothing to compare with; give another batch"
            )
    return gradients, steps


def one_step(
    model: nn.Module, batch: Any, loss_of: LossOf, scaled: Callable[[Tensor], Tensor] = _as_it_is
) -> tuple[Tensor, dict[str, Tensor | None], list[Step]]:
    """The loss of one step, the gradients of what ``scaled`` makes of it, decoded, and what its operators gave."""
    model.zero_grad()
    with torch.random.fork_rng(), Recorder(model) as recorder:
        torch.manual_seed(0)
        loss = loss_of(_called(model, batch))
        if not isinstance(loss, Tensor):
            raise TypeError(f"the loss gave a {type(loss).__name__}: give a scalar tensor, loss=lambda output: ...")
        if loss.numel() != 1:
            raise ValueError(f"the loss has shape {list(loss.shape)}: give a scalar, loss=lambda output: ...")
        if loss.requires_grad:
            scaled(loss).backward()
    trained = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    gradients = {name: None if grad is None else plain(grad) for name, grad in trained.items()}
    return loss.detach(), gradients, recorder.steps


def _called(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


def default_loss(seed: int) -> LossOf:
    """The output's own loss, or its elements under fixed random weights."""

    def loss_of(output: Any) -> Tensor:
        own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        if own is not None:
            return own
        generator = torch.Generator().manual_seed(seed)
        leaves = tree_leaves(dict(output) if isinstance(output, Mapping) else output)
        floats = [x for x in leaves if isinstance(x, Tensor) and x.is_floating_point() and x.requires_grad]
        if not floats:
            raise ValueError("no floating output depends on the parameters: give loss=lambda output: ...")
        kind = {"dtype": torch.float32, "device": "cpu", "generator": generator}
        return sum((x * torch.randn(x.shape, **kind).to(x.device)).sum() for x in floats)

    return loss_of


def difference(wanted: Tensor | None, got: Tensor | None) -> float:
    if wanted is None or got is None:
        return 0.0 if wanted is got else float("inf")
    return 0.0 if same_bits(wanted, got) else relative(wanted, got)
