"""What is planted into models for `bench_verify`: faults that verify must name, and what is right and looks odd."""

import contextlib
import itertools
import random
from collections.abc import Callable

BOTH = ("scaled-fp16", "fp16-adaptive")
SCALES, EXPONENTS = BOTH[:1], BOTH[1:]
_BOUND = 1e-6


class Places:
    """Where a plant goes: layers and parameters that the loss depends on, by a draw.

    Args:
        found: what `places_of` gave.
        batch: what the model is called with.
        draws: which place.
        undo: takes what must be put back.
    """

    def __init__(self, found: tuple[list[str], list[str]], batch, draws: random.Random, undo) -> None:
        self._layers, self._parameters = found
        self.batch, self.draws, self.undo = batch, draws, undo

    def layer(self, model):
        """A module whose output is one tensor."""
        return model.get_submodule(self.draws.choice(self._layers))

    def parameter(self, model):
        """A parameter that trains."""
        return model.get_parameter(self.draws.choice(self._parameters))


def places_of(model, batch) -> tuple[list[str], list[str]]:
    """Names of layers that are called once, and of parameters, whose gradients are above the bound that is planted."""
    import torch

    calls, large = {}, set()

    def hook(name):
        def noted(module, inputs, output):
            calls[name] = calls.get(name, 0) + 1
            if isinstance(output, torch.Tensor) and output.requires_grad and output.dim() > 1:
                output.register_hook(lambda g: large.add(name) if g.numel() and g.abs().max() > 10 * _BOUND else None)

        return noted

    modules = [(name, module) for name, module in model.named_modules() if hasattr(module, "weight")]
    modules = [(name, module) for name, module in modules if not list(module.children())]
    handles = [module.register_forward_hook(hook(name)) for name, module in modules]
    model(**batch).loss.backward()
    for handle in handles:
        handle.remove()
    trained = [(name, p.grad) for name, p in model.named_parameters() if p.grad is not None]
    parameters = [name for name, grad in trained if grad.numel() and grad.abs().max() > 10 * _BOUND]
    model.zero_grad()
    return [name for name in calls if calls[name] == 1 and name in large], parameters


def plant(*recipes: str) -> Callable:
    """Say under which recipes something is planted."""

    def noted(function: Callable) -> Callable:
        function.recipes = recipes
        return function

    return noted


def _after(layer, change: Callable) -> None:
    layer.register_forward_hook(lambda module, inputs, output: change(output))


@plant(*BOTH)
def nothing(model, places: Places) -> None:
    """As it is."""


@plant(*BOTH)
def own_counter(model, places: Places) -> None:
    """A counter that is an attribute."""
    layer = places.layer(model)

    def hook(module, inputs, output):
        module.calls = getattr(module, "calls", 0) + 1
        return output * module.calls

    layer.register_forward_hook(hook)


@plant(*BOTH)
def unsaved_buffer(model, places: Places) -> None:
    """A running value in a buffer that is not saved."""
    import torch

    layer = places.layer(model)
    layer.register_buffer("seen", torch.ones(()), persistent=False)

    def hook(module, inputs, output):
        module.seen += 1
        return output * module.seen

    layer.register_forward_hook(hook)


@plant(*BOTH)
def own_generator(model, places: Places) -> None:
    """A generator that is an attribute."""
    import torch

    layer = places.layer(model)
    layer.draws = torch.Generator().manual_seed(1)
    layer.register_forward_hook(
        lambda module, inputs, output: output * torch.rand(output.shape, generator=module.draws)
    )


@plant(*BOTH)
def python_randomness(model, places: Places) -> None:
    """Python's and NumPy's random bits decide."""
    import numpy as np

    _after(places.layer(model), lambda output: output * (0.5 + random.random()) * (0.5 + float(np.random.rand())))


@plant(*BOTH)
def transposed_dropout(model, places: Places) -> None:
    """Dropout of a tensor that is dense and not contiguous."""
    from torch.nn.functional import dropout

    _after(places.layer(model), lambda output: dropout(output.transpose(0, -1), 0.1).transpose(0, -1))


@plant(*EXPONENTS)
def linear_hook(model, places: Places) -> None:
    """A parameter's hook halves its gradient."""
    places.parameter(model).register_hook(lambda gradient: gradient * 0.5)


@plant(*BOTH)
def bounded_hook(model, places: Places) -> None:
    """A parameter's hook bounds its gradient."""
    places.parameter(model).register_hook(lambda gradient: gradient.clamp(-_BOUND, _BOUND))


@plant(*BOTH)
def accumulated_hook(model, places: Places) -> None:
    """A hook bounds a gradient once it is accumulated."""
    places.parameter(model).register_post_accumulate_grad_hook(lambda p: p.grad.clamp_(-_BOUND, _BOUND))


@plant(*EXPONENTS)
def bounded_backward(model, places: Places) -> None:
    """A custom backward pass bounds the gradient."""
    function = _bounded()
    _after(places.layer(model), lambda output: function.apply(output, True))


@plant(*EXPONENTS)
def bounded_later(model, places: Places) -> None:
    """A custom backward pass bounds the gradient from the third step on."""
    function = _bounded()
    layer = places.layer(model)

    def hook(module, inputs, output):
        module.calls = getattr(module, "calls", 0) + 1
        return function.apply(output, module.calls > 2)

    layer.register_forward_hook(hook)


@plant(*EXPONENTS)
def bounded_module_hook(model, places: Places) -> None:
    """A module's backward hook bounds the gradient that it passes on."""

    def hook(module, gradients):
        return tuple(None if g is None else g.clamp(-_BOUND, _BOUND) for g in gradients)

    places.layer(model).register_full_backward_pre_hook(hook)


def _bounded():
    import torch

    class Bounded(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, on):
            ctx.on = on
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient.clamp(-_BOUND, _BOUND) if ctx.on else gradient, None

    return Bounded


@plant(*BOTH)
def counting_closure(model, places: Places) -> None:
    """How often a closure was called decides."""
    calls = itertools.count(1)
    _after(places.layer(model), lambda output: output * (1 + 0.01 * next(calls)))


@plant(*BOTH)
def closed_generator(model, places: Places) -> None:
    """A closure draws from a generator of its own."""
    import torch

    draws = torch.Generator().manual_seed(1)
    _after(places.layer(model), lambda output: output * torch.rand(output.shape, generator=draws))


@plant(*BOTH)
def closed_numpy_generator(model, places: Places) -> None:
    """A closure draws from a NumPy generator."""
    import numpy as np

    draws = np.random.default_rng(1)
    _after(places.layer(model), lambda output: output * float(draws.random()))


@plant(*SCALES)
def scaled_only(model, places: Places) -> None:
    """A layer computes something else of scaled tensors."""
    import torch

    import halfulp as hu

    def change(output):
        uneven = torch.linspace(1, 1.002, output.shape[-1])
        return output * uneven if isinstance(output, hu.ScaledTensor) else output

    _after(places.layer(model), change)


@plant(*SCALES)
def wrong_buffer(model, places: Places) -> None:
    """A buffer is another under a scale, which no gradient shows."""
    import torch

    import halfulp as hu

    layer = places.layer(model)
    layer.register_buffer("largest", torch.zeros(()))

    def hook(module, inputs, output):
        scaled = isinstance(output, hu.ScaledTensor)
        values = (output.decode() if scaled else output).detach()
        module.largest = values.abs().max() * (1.001 if scaled else 1.0)

    layer.register_forward_hook(hook)


@plant(*SCALES)
def mask_by_layout(model, places: Places) -> None:
    """Dropout draws another mask for scaled tensors, as their memory lies otherwise."""
    from torch.nn.functional import dropout

    import halfulp as hu

    def change(output):
        turned = output.transpose(0, -1)
        turned = turned.clone(memory_format=_contiguous()) if isinstance(output, hu.ScaledTensor) else turned
        return dropout(turned, 0.5).transpose(0, -1).contiguous()

    _after(places.layer(model), change)


def _contiguous():
    import torch

    return torch.contiguous_format


@plant(*SCALES)
def wrong_rule(model, places: Places) -> None:
    """The rule of one operator is off by 1e-4."""
    _replace_rule(model, places, lambda result: result * (1 + 1e-4), backward=False)


@plant(*SCALES)
def flushing_rule(model, places: Places) -> None:
    """The rule of an operator of the backward pass flushes small elements."""
    import torch

    import halfulp as hu

    def flushed(result):
        values = result.decode(torch.float32)
        small = values.abs() < 1e-3 * values.abs().max() if values.numel() else values == 0
        return hu.ScaledTensor.encode(torch.where(small, 0.0, values), torch.float32)

    _replace_rule(model, places, flushed, backward=True)


def _replace_rule(model, places: Places, change: Callable, backward: bool) -> None:
    """Change the first result of an operator that the model runs on scaled tensors."""
    import halfulp as hu
    from halfulp.scaled._registry import RULES

    operator = places.draws.choice(sorted(_ran(model, places.batch, backward), key=str))
    right = RULES[operator]
    inside = []

    def wrong(*arguments, **options):
        result = right(*arguments, **options)
        if inside:
            return result
        inside.append(True)
        with contextlib.ExitStack() as left:
            left.callback(inside.clear)
            if isinstance(result, hu.ScaledTensor):
                return change(result)
            return type(result)([change(result[0]), *result[1:]])

    RULES[operator] = wrong
    places.undo.callback(RULES.__setitem__, operator, right)


def _ran(model, batch, backward: bool) -> set:
    """Operators with a rule of their own whose first result was scaled and of many sizes, in one of the passes."""
    import copy

    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    import halfulp as hu
    from halfulp.scaled._registry import RULES

    ran = set()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, arguments=(), options=None):
            result = operator(*arguments, **(options or {}))
            first = result[0] if isinstance(result, (tuple, list)) and result else result
            on = (torch._C._current_graph_task_id() != -1) == backward
            if on and operator in RULES and not operator.is_view and isinstance(first, hu.ScaledTensor):
                sizes = first.detach().decode(torch.float32).abs()
                if first.numel() > 8 and sizes.max() > 0 and bool((sizes[sizes > 0] < 1e-4 * sizes.max()).any()):
                    ran.add(operator)
            return result

    other = hu.scalify(copy.deepcopy(model), torch.float32, wide="none")
    with Watch():
        other(**batch).loss.backward()
    return ran


RIGHT = (own_counter, unsaved_buffer, own_generator, python_randomness, transposed_dropout, linear_hook)
FAULTS = (
    *(bounded_hook, accumulated_hook, bounded_backward, bounded_later, bounded_module_hook),
    *(counting_closure, closed_generator, closed_numpy_generator),
    *(scaled_only, wrong_buffer, mask_by_layout, wrong_rule, flushing_rule),
)
