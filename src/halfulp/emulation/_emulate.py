"""emulate: a model, or a function, as if every operator were done by hardware of a format."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from .._torch_versions import HAS_GRAPH_BREAK_REASON_ARGUMENT, is_exporting
from ..formats import Format
from ..gradients.eager._attach import NotScriptedError
from ..rounding import Nearest, Rounding
from ..subclass.models._parameter_holders import EMULATED_FORMAT_ATTRIBUTE
from ._region import RoundingRegion, describe_recording_refusal, refuse_recording, region
from ._rounder import WIDE_DTYPES, Rounder


class Emulation:
    """The result of `emulate`: calls the model under emulation, and can be removed.

    It is also the model's `forward` while it is in effect, so deepcopy and pickle take it along: the copy's is
    `copy.forward`. As a context manager it removes itself at the end of the block.
    """

    def __init__(self, target: Callable[..., Any], rounder: Rounder, parameters: str) -> None:
        self.target = target
        self.rounder = rounder
        self.parameters = parameters
        self._replaced_forward = vars(target).get("forward") if isinstance(target, nn.Module) else None

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._original_forward)

    @property
    def _original_forward(self) -> Callable[..., Any]:
        if not isinstance(self.target, nn.Module):
            return self.target
        plain: Callable[..., Any] = self._replaced_forward or type(self.target).forward.__get__(self.target)
        return plain

    @property
    def __code__(self) -> NoReturn:
        """Raise to torch.export and torch.jit.script, which read this, or the next, before they call."""
        raise NotScriptedError(describe_recording_refusal("torch.export or torch.jit.script"))

    __globals__ = __code__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward, or the function, with every operator rounded.

        Raises:
            NotImplementedError: torch.export, torch.jit.trace or make_fx records the call.
        """
        if is_exporting():
            raise NotImplementedError(describe_recording_refusal("torch.export"))
        if HAS_GRAPH_BREAK_REASON_ARGUMENT and torch.compiler.is_compiling():
            torch._dynamo.graph_break(
                "an emulated model runs eagerly, and every operator is rounded: no fullgraph=True"
            )
        return self._call_emulated(*args, **kwargs)

    @torch._disable_dynamo  # torch.compiler.disable would import the compiler with this module
    def _call_emulated(self, *args: Any, **kwargs: Any) -> Any:
        refuse_recording()
        if isinstance(self.target, nn.Module) and self.parameters == "round":
            for name, parameter in self.target.named_parameters():
                if self.rounder.has_numbers_outside_format(parameter):  # as one that an optimizer of others wrote does
                    raise ValueError(
                        f"parameter {name!r} was given numbers that {self.rounder.format.name} does not have: update "
                        f"it with an optimizer of halfulp.optim and format={self.rounder.format.name!r}, or say "
                        "emulate(..., parameters='keep') to let operators read float32 parameters"
                    )
        args, kwargs = _map_tensors_in_arguments(
            lambda x: x if _needs_gradient(x) else self.rounder.round_copy(x, "an argument"), (args, kwargs)
        )
        with RoundingRegion(self.rounder):
            # A clone is an operator, so that an argument with a gradient is rounded, and its gradient as well.
            args, kwargs = _map_tensors_in_arguments(lambda x: x.clone() if _needs_gradient(x) else x, (args, kwargs))
            return self._original_forward(*args, **kwargs)

    def region(self) -> RoundingRegion:
        """Return a `with` block under the same settings, counted here: for a loss outside the model."""
        return RoundingRegion(self.rounder)

    def remove(self) -> None:
        """Restore the model's own forward; calling it again does nothing.

        Values stay as they were rounded, and graphs made before still round their gradients.
        """
        if isinstance(self.target, nn.Module) and vars(self.target).get("forward") is self:
            del self.target.forward
            for parameter in self.target.parameters():
                parameter.__dict__.pop(EMULATED_FORMAT_ATTRIBUTE, None)
            if self._replaced_forward is not None:
                self.target.forward = self._replaced_forward

    def __enter__(self) -> Emulation:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()

    def __repr__(self) -> str:
        name = getattr(self.target, "__name__", type(self.target).__name__)
        return f"Emulation({name}, {self.rounder.format.name}, {self.rounder.rounding})"


def emulate(
    model: nn.Module | Callable[..., Any],
    format: Format | str | torch.dtype,
    rounding: Rounding | str = Nearest(),  # noqa: B008  frozen
    *,
    overflow: str | None = None,
    parameters: str = "round",
) -> Emulation:
    """Round every operator's output to a format, forward and backward: the 16-bit-FPU model.

    As in "Revisiting BFloat16 Training" (Zamirai, Zhang, Aberger and De Sa, arXiv 2010.06192, section 2), each
    operator takes numbers of the format, computes in float32 (a matmul accumulates there), and rounds its output
    once. The model is changed in place, and stays a float32 model whose tensors hold the format's values.

    - **Forward**, an operator is what torch dispatches below autograd, as in eager bfloat16: `linear` is one
      (`addmm`), so are `softmax`, `layer_norm`, `gelu`, `convolution`, a fused `scaled_dot_product_attention` or
      LSTM layer; `cross_entropy` is two. Views are none. Written tensors (in-place operators, running statistics)
      are rounded where they lie. Statistics that only the backward pass reads (the mean of a norm, the logsumexp of
      attention) are inside the operator, in float32.
    - **Backward**, an operator is an autograd node: each gradient that it gives is rounded once. A tensor with
      several uses gets their sum, taken in float32 and rounded; so does a leaf's `.grad` at each accumulation.
    - Arguments are rounded on entry, gradients from outside too. What is computed outside the model, such as the
      loss, is not: put it in `with emulation.region():`, or emulate the loss function.
    - `torch.compile` does not see the model: it breaks the graph there and gives the bits of eager mode
      (`fullgraph=True` is refused by torch).
    - What records a graph to run elsewhere (`torch.export`, `torch.jit`, `make_fx`, ONNX) is refused: roundings are no
      operators of the model. `remove()` first exports the plain model, whose numbers are float32's.

    Args:
        model: a module with float32 or float64 parameters, changed in place; or any function.
        format: a `Format`, its name or a torch dtype. Values beyond its largest, such as a mask of
            `torch.finfo(torch.float32).min`, overflow as its policy says.
        rounding: a mode or its name. torch.manual_seed governs a stochastic one, which takes no seed of its own.
        overflow: "inf", "nan" or "saturate" in place of the format's own policy.
        parameters: "round" rounds parameters and floating buffers in place now, and raises later if an optimizer
            leaves the format (`halfulp.optim` with `format=` does not); "keep" lets operators read them as they are,
            the paper's float32 weights.

    Returns:
        An `Emulation`: a handle with `remove()`, `region()`, a context manager, and for a function the
        emulated function.

    Raises:
        TypeError: If the model is neither a module nor callable, is a ScriptModule, or has parameters of 16 bits.
        ValueError: If the model or a part is emulated already, a parameter or buffer to be rounded has no shape yet,
            the format is a block format or lacks zero or negative numbers, or `parameters` is neither word.
        NotImplementedError: If a parameter or buffer is no dense plain tensor, or a buffer is of 16 bits. The model is
            as it was after any error.

    >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    >>> with emulate(model, "e8m3") as emulation:
    ...     y = model(torch.randn(2, 4))
    >>> bool(emulation.rounder.round_copy(y, "") .equal(y))
    True
    >>> loss = emulate(nn.functional.mse_loss, "e8m3")
    >>> loss(torch.tensor([1.0]), torch.tensor([0.0]))
    tensor(1.)
    """
    if parameters not in ("round", "keep"):
        raise ValueError(f"parameters is 'round' or 'keep', got {parameters!r}")
    rounder = Rounder(format, rounding, overflow)
    if not isinstance(model, nn.Module):
        if not callable(model) or isinstance(model, type):
            raise TypeError(f"emulate takes a module or a function, got {model!r}")
        return Emulation(model, rounder, parameters)
    model = getattr(model, "_orig_mod", model)
    _check_can_emulate_model(model)
    if parameters == "round":
        held = {f"parameter {name}": value for name, value in model.named_parameters()}
        held |= {f"buffer {name}": value for name, value in model.named_buffers()}
        for name, value in held.items():
            rounder.check_tensor(value, name)
        with torch.no_grad():
            for name, value in held.items():
                rounder.round_in_place(value, name)
        for parameter in model.parameters():
            setattr(parameter, EMULATED_FORMAT_ATTRIBUTE, rounder.format.name)
    emulation = Emulation(model, rounder, parameters)
    model.forward = emulation
    return emulation


emulate.region = region  # type: ignore[attr-defined]  # hu.emulate is this function and hides the package that holds region


def _map_tensors_in_arguments(change: Callable[[Tensor], Tensor], arguments: tuple[Any, ...]) -> Any:
    """Change the tensors among arguments, also in lists, tuples and dicts; other objects, such as a cache, are kept."""
    return tree_map_only(Tensor, change, arguments, is_leaf=lambda x: not isinstance(x, list | tuple | dict))


def _needs_gradient(tensor: Tensor) -> bool:
    return tensor.requires_grad and torch.is_grad_enabled()


def _check_can_emulate_model(model: nn.Module) -> None:
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError("emulate cannot see into a ScriptModule: pass the module it was scripted from")
    for name, module in model.named_modules():
        if isinstance(vars(module).get("forward"), Emulation):
            raise ValueError(
                f"{repr(name) if name else 'the model'} is emulated already ({module.forward!r}): end that first, "
                "by its remove() (the handle is the module's forward)"
            )
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and parameter.dtype not in WIDE_DTYPES:
            raise TypeError(
                f"emulate needs float32 or float64 parameters, because an operator on {parameter.dtype} has rounded "
                f"once already; {name!r} is {parameter.dtype}: call model.float() first"
            )
