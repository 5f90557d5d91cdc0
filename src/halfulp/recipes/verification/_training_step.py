"""One forward and backward pass of a model, with all its results, to compare with another."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from ..._messages import a_kind
from ...kernels import same_bits
from ...scaled import ScaledTensor
from ._agreement import relative
from ._copies import copy_of, same_randomness
from ._perturbation import Jitter

LossOf = Callable[[Any], Tensor]

# A run in float64, or with jitter, that is farther from float32's than this drew other random numbers, or computed
# something else.
_SAME_RUN = 1e-2


@dataclasses.dataclass(frozen=True)
class Run:
    """The results of one step of a model, decoded.

    Attributes:
        values: the loss, floating outputs and floating buffers, by what they are called in a report.
        gradients: of each parameter that trains, by name; None where there is none.
    """

    values: dict[str, Tensor]
    gradients: dict[str, Tensor | None]

    @property
    def loss(self) -> Tensor:
        """The loss."""
        return self.values["the loss"]


def _as_it_is(loss: Tensor) -> Tensor:
    return loss


def reference(model: nn.Module, batch: Any, loss_of: LossOf) -> Run:
    """A step of a copy in plain float32, which must be finite, and the same when it is run again.

    Raises:
        ValueError: nothing to compare with.
    """
    run = one_step(copy_of(model), batch, loss_of)
    if not bool(run.loss.isfinite().all()):
        raise ValueError(f"in plain float32 the loss is {run.loss.item()}: nothing to compare with; give another batch")
    if all(grad is None for grad in run.gradients.values()):
        raise ValueError("in plain float32 no parameter has a gradient: give a loss that depends on one that trains")
    for name, grad in run.gradients.items():
        if grad is not None and not bool(grad.isfinite().all()):
            raise ValueError(
                f"in plain float32 the gradient of {name!r} is not finite: nothing to compare with; give another batch"
            )
    again = one_step(copy_of(model), batch, loss_of)
    for name, (first, second) in pairs(run, again).items():
        if difference(first, second):
            raise ValueError(
                f"two runs of the plain model differ in {name}: it keeps a state that a copy does not (a closure's, a "
                "global one, a random generator of its own), and nothing can be proved; make that state a buffer or an "
                "attribute of a module"
            )
    return run


def in_float64(model: nn.Module, batch: Any, loss_of: LossOf, plain: Run, step: int = 1) -> Run | None:
    """Run the step in float64, to estimate float32's own error.

    Where it does not run there, it is the step in float32 with `Jitter`; None where both are another computation.
    """
    return _like(plain, lambda: _steps(copy_of(model).double(), tree_map(_double, batch), loss_of, step)) or _like(
        plain, lambda: _steps(copy_of(model), batch, loss_of, step, Jitter)
    )


def _steps(model: nn.Module, batch: Any, loss_of: LossOf, count: int, watch: Callable | None = None) -> Run:
    for _ in range(count):
        run = one_step(model, batch, loss_of, watch=watch and watch())
    return run


def _like(plain: Run, steps: Callable[[], Run]) -> Run | None:
    """Return a run's results if it finishes and draws the same random numbers as the plain run; else None."""
    try:
        other = steps()
    except Exception:  # whatever a model of somebody else's raises in another dtype
        return None
    both = list(pairs(plain, other).values())
    if any((a is None) != (b is None) or (a is not None and b is not None and a.shape != b.shape) for a, b in both):
        return None
    # Of a gradient that is 0 but for rounding float32 has no digit: all gradients are taken together.
    ours, theirs = (_concatenated(run.gradients.values()) for run in (plain, other))
    return other if relative(plain.loss, other.loss) < _SAME_RUN and relative(ours, theirs) < _SAME_RUN else None


def _concatenated(gradients: Iterable[Tensor | None]) -> Tensor:
    return torch.cat([gradient.double().flatten() for gradient in gradients if gradient is not None])


def one_step(
    model: nn.Module,
    batch: Any,
    loss_of: LossOf,
    scaled: Callable[[Tensor], Tensor] = _as_it_is,
    watch: contextlib.AbstractContextManager | None = None,
) -> Run:
    """Run a model on a batch, and backward from what ``scaled`` makes of the loss, under ``watch``."""
    model.zero_grad()
    with same_randomness(), watch or contextlib.nullcontext():
        output = called(model, batch)
        loss = loss_of(output)
        if not isinstance(loss, Tensor):
            raise TypeError(f"the loss gave {a_kind(loss)}: give a scalar tensor, loss=lambda output: ...")
        if loss.numel() != 1:
            raise ValueError(f"the loss has shape {list(loss.shape)}: give a scalar, loss=lambda output: ...")
        if loss.requires_grad:
            scaled(loss).backward()
    trained = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    gradients = {name: None if grad is None else plain(grad) for name, grad in trained.items()}
    return Run(_values(model, output, loss), gradients)


def _values(model: nn.Module, output: Any, loss: Tensor) -> dict[str, Tensor]:
    values = {"the loss": loss}
    leaves = tree_leaves(dict(output) if isinstance(output, Mapping) else output)
    values |= {f"output {index}": x for index, x in enumerate(leaves) if _floating(x)}
    values |= {f"buffer {name!r}": x for name, x in model.named_buffers() if _floating(x)}
    return {name: plain(x) for name, x in values.items()}


def pairs(wanted: Run, got: Run) -> dict[str, tuple[Tensor | None, Tensor | None]]:
    """Pairs of two runs' results: the loss, outputs, buffers and gradients."""
    values = {name: (wanted.values.get(name), got.values.get(name)) for name in {**wanted.values, **got.values}}
    names = {**wanted.gradients, **got.gradients}
    return values | {f"gradient {name!r}": (wanted.gradients.get(name), got.gradients.get(name)) for name in names}


def plain(x: Tensor) -> Tensor:
    """A copy of the values, decoded."""
    x = x.detach()
    return x.decode(torch.float32) if isinstance(x, ScaledTensor) else x.clone()


def _floating(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def _double(x: Any) -> Any:
    return x.double() if _floating(x) else x


def called(model: nn.Module, batch: Any) -> Any:
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
        weights = (torch.randn(x.shape, dtype=torch.float32, device="cpu", generator=generator) for x in floats)
        first, *others = ((x * weight.to(x.device)).sum() for x, weight in zip(floats, weights))
        return sum(others, first)

    return loss_of


def difference(wanted: Tensor | None, got: Tensor | None) -> float:
    """The relative norm of the difference, 0 where the bits are the same, infinite where one is missing."""
    if wanted is None or got is None:
        return 0.0 if wanted is got else float("inf")
    if wanted.shape != got.shape:
        return float("inf")
    return 0.0 if same_bits(wanted, got) else relative(wanted, got)
