"""Rounding of what linear layers and convolutions multiply, as a narrow tensor core would."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ..formats import block_names
from ..gradients._functions import map_tensors
from ..kernels._plain_memory import is_floating
from ..rounding import quantize, straight_through
from ._plan import has_rounded_operands
from ._recipe import Recipe


class RoundOperandsHook:
    """Pre-hook of a layer: its input and its weight are rounded to nearest, with the gradient of the identity.

    The weight is shadowed by an attribute for one forward pass: the parameter keeps its numbers and its name.
    """

    def __init__(self, format: str) -> None:
        self.format = format

    def __call__(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple, dict]:
        if getattr(layer, "_is_replica", False):
            _raise_for_layer_copy(layer, self.format)
        vars(layer)["weight"] = straight_through(layer._parameters["weight"], self.format)
        return map_tensors((args, kwargs), lambda x: straight_through(x, self.format) if is_floating(x) else x, False)


class RoundResultHook:
    """Hook of a layer: its result is rounded, and its weight is the parameter again, also where it raised."""

    def __init__(self, format: str) -> None:
        self.format = format

    def __call__(self, layer: Any, inputs: tuple[Any, ...], output: Any) -> Any:
        vars(layer).pop("weight", None)
        return straight_through(output, self.format) if is_floating(output) else None


class RefuseLayerCopiesHook:
    """Pre-hook of a layer with a `BlockProductForward`: refuses a copy, whose forward is that of the original."""

    def __init__(self, forward: BlockProductForward) -> None:
        self.forward = forward

    def __call__(self, layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        # copy.copy shares the table of parameters, and so all numbers.
        if layer is not self.forward.layer and layer._parameters is not self.forward.layer._parameters:
            _raise_for_layer_copy(layer, self.forward.format)


ROUNDING_HOOK_TYPES = RoundOperandsHook | RoundResultHook | RefuseLayerCopiesHook


def _raise_for_layer_copy(layer: nn.Module, format: str) -> NoReturn:
    raise NotImplementedError(
        f"this {type(layer).__name__} is a replica, or a shallow copy with parameters of its own, of a layer whose "
        f"operands are rounded to {format}, and would compute with the original's: take copy.deepcopy for copies, and "
        "DistributedDataParallel in place of nn.DataParallel"
    )


class BlockProductForward:
    """The forward of a layer, in place of its class's: operands of its three products are rounded in blocks.

    Blocks lie along the dimension that a product sums over: input channels forward, output channels for the gradient of
    the input, examples (and positions of linear layers) for that of the weight. Sums are float32.
    """

    def __init__(self, layer: Any, format: str) -> None:
        self.layer, self.format = layer, format

    def __call__(self, input: Tensor, *size: Any, **named: Any) -> Tensor:
        """The layer's result; a transposed convolution takes `output_size` too."""
        size = (*size, *named.values())
        result: Tensor = _BlockProductFunction.apply(input, self.layer.weight, self.layer.bias, self, size)
        return result

    def run_class_forward(
        self, input: Tensor, weight: Tensor, size: tuple[Any, ...], bias: Tensor | None = None
    ) -> Tensor:
        """Return the class's own forward, with another weight and bias."""
        own = vars(self.layer)
        own["weight"], own["bias"] = weight, bias
        try:
            result: Tensor = type(self.layer).forward(self.layer, input, *size)
        finally:
            del own["weight"], own["bias"]
        return result

    @property
    def spatial_dimension_count(self) -> int:
        """The number of position dimensions behind the channels."""
        return len(getattr(self.layer, "kernel_size", ()))

    def quantize_in_channel_blocks(self, x: Tensor) -> Tensor:
        """Quantize inputs, results or their gradients in blocks of channels."""
        return quantize(x, self.format, dim=-1 - self.spatial_dimension_count)

    def quantize_in_example_blocks(self, x: Tensor) -> Tensor:
        """Quantize inputs or result gradients in blocks of examples, a linear layer's positions included."""
        if isinstance(self.layer, nn.Linear):
            return quantize(x.reshape(-1, x.shape[-1]), self.format, dim=0).view(x.shape)
        if x.ndim == 1 + self.spatial_dimension_count:  # one example
            return quantize(x.unsqueeze(0), self.format, dim=0).squeeze(0)
        return quantize(x, self.format, dim=0)

    def round_weight(self, weight: Tensor, along_inputs: bool) -> Tensor:
        """Return the weight in blocks of input channels, or of output channels."""
        return quantize(weight, self.format, dim=int(along_inputs != getattr(self.layer, "transposed", False)))


class _BlockProductFunction(torch.autograd.Function):
    """A layer's product of operands in blocks, and its gradients'; a tangent is multiplied unrounded."""

    @staticmethod
    def forward(input: Tensor, weight: Tensor, bias: Tensor | None, layer: BlockProductForward, size: Any) -> Tensor:
        return layer.run_class_forward(
            layer.quantize_in_channel_blocks(input), layer.round_weight(weight, along_inputs=True), size, bias
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        input, weight, bias, ctx.layer, ctx.size = inputs
        ctx.biased = bias is not None
        ctx.save_for_backward(input, weight)
        ctx.save_for_forward(input, weight)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        layer: BlockProductForward = ctx.layer
        found: list[Tensor | None] = [None, None, None]
        with torch.enable_grad():
            if ctx.needs_input_grad[0]:
                whole = input.detach().requires_grad_()
                result = layer.run_class_forward(
                    whole, layer.round_weight(weight.detach(), along_inputs=False), ctx.size
                )
                (found[0],) = torch.autograd.grad(result, whole, layer.quantize_in_channel_blocks(gradient))
            if ctx.needs_input_grad[1]:
                whole = weight.detach().requires_grad_()
                result = layer.run_class_forward(layer.quantize_in_example_blocks(input.detach()), whole, ctx.size)
                (found[1],) = torch.autograd.grad(result, whole, layer.quantize_in_example_blocks(gradient))
        if ctx.biased and ctx.needs_input_grad[2]:
            channels = gradient.ndim - 1 - layer.spatial_dimension_count
            others = [k for k in range(gradient.ndim) if k != channels]
            found[2] = gradient.sum(others) if others else gradient
        return *found, None, None

    @staticmethod
    def jvp(ctx: Any, input_tangent: Any, weight_tangent: Any, bias_tangent: Any, *_: None) -> Tensor:
        input, weight = ctx.saved_tensors
        layer: BlockProductForward = ctx.layer
        tangents: list[Tensor] = []
        if input_tangent is not None:
            rounded = layer.round_weight(weight, along_inputs=True)
            tangents.append(layer.run_class_forward(input_tangent, rounded, ctx.size))
        if weight_tangent is not None:
            tangents.append(layer.run_class_forward(layer.quantize_in_channel_blocks(input), weight_tangent, ctx.size))
        if bias_tangent is not None:
            tangents.append(bias_tangent.view(-1, *(1,) * layer.spatial_dimension_count))
        return sum(tangents[1:], tangents[0])


def install_operand_rounding(model: nn.Module, recipe: Recipe) -> None:
    """Let the layers of a model round what they read and give."""
    for name, module in model.named_modules():
        if not has_rounded_operands(recipe, name, module):
            continue
        format = str(recipe.operand_format)
        if format in block_names():
            forward = vars(module)["forward"] = BlockProductForward(module, format)
            module.register_forward_pre_hook(RefuseLayerCopiesHook(forward))
            continue
        module.register_forward_pre_hook(RoundOperandsHook(format), with_kwargs=True)
        module.register_forward_hook(RoundResultHook(format), always_call=True)
