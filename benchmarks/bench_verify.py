"""What `hu.verify` says of right models and of planted faults: `python -m benchmarks.bench_verify`."""

import argparse
import copy
import random
import warnings
from collections.abc import Callable

from ._architectures import ARCHITECTURES, build
from ._results import Result, Table, save

TEXT = """Tiny random configurations of transformers' classes in training mode, unmodified and with one fault planted \
each, under random scales (scaled-fp16) and random exponents (fp16-adaptive). A right model must pass; of a fault \
"found" means that verify FAILED, "refused" that it said in a ValueError why nothing can be proved."""
RECIPES = ("scaled-fp16", "fp16-adaptive")


def _layers(model):
    """Modules with a weight of two dimensions, whose output is one tensor."""
    import torch

    return [module for module in model.modules() if isinstance(module, torch.nn.Linear)]


def _bounded():
    import torch

    class Bounded(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient.clamp(-1e-6, 1e-6)

    return Bounded


def bounded_hook(model, draws) -> None:
    """A parameter's hook bounds its gradient."""
    draws.choice(_layers(model)).weight.register_hook(lambda gradient: gradient.clamp(-1e-6, 1e-6))


def bounded_backward(model, draws) -> None:
    """A layer's backward pass bounds the gradient."""
    function = _bounded()
    draws.choice(_layers(model)).register_forward_hook(lambda module, inputs, output: function.apply(output))


def counting_closure(model, draws) -> None:
    """A layer's output depends on how often a closure was called."""
    calls = []

    def hook(module, inputs, output):
        calls.append(1)
        return output * (1 + 0.01 * len(calls))

    draws.choice(_layers(model)).register_forward_hook(hook)


def closed_generator(model, draws) -> None:
    """A closure draws from a generator of its own."""
    import torch

    generator = torch.Generator().manual_seed(1)
    draws.choice(_layers(model)).register_forward_hook(
        lambda module, inputs, output: output * torch.rand(output.shape, generator=generator)
    )


def scaled_only(model, draws) -> None:
    """A layer computes something else where it meets a ScaledTensor."""
    import halfulp as hu

    draws.choice(_layers(model)).register_forward_hook(
        lambda module, inputs, output: output * 1.001 if isinstance(output, hu.ScaledTensor) else output
    )


def own_counter(model, draws) -> None:
    """Right: a counter that is an attribute."""

    def hook(module, inputs, output):
        module.calls = getattr(module, "calls", 0) + 1
        return output * module.calls

    draws.choice(_layers(model)).register_forward_hook(hook)


def python_randomness(model, draws) -> None:
    """Right: Python's random bits decide."""
    draws.choice(_layers(model)).register_forward_hook(lambda module, inputs, output: output * (0.5 + random.random()))


def transposed_dropout(model, draws) -> None:
    """Right: dropout of a tensor that is dense and not contiguous."""
    from torch.nn.functional import dropout

    draws.choice(_layers(model)).register_forward_hook(
        lambda module, inputs, output: dropout(output.transpose(0, -1), 0.1).transpose(0, -1)
    )


def nothing(model, draws) -> None:
    """Right: as it is."""


RIGHT = (nothing, own_counter, python_randomness, transposed_dropout)
# The fault, and the recipes that must find it: a bound on gradients is the same number under any scale of tensors.
FAULTS: dict[Callable, tuple[str, ...]] = {
    bounded_hook: RECIPES,
    bounded_backward: ("fp16-adaptive",),
    counting_closure: RECIPES,
    closed_generator: RECIPES,
    scaled_only: ("scaled-fp16",),
}


def said(model, batch, recipe: str) -> str:
    """What verify makes of it: "passed", "found" or "refused", with its words where that is not the expected."""
    import halfulp as hu

    try:
        found = hu.verify(model, batch, recipe, trials=1)
    except ValueError as error:
        return f"refused: {error}"
    return "passed" if found.passed else f"found: {found}"


def main() -> None:
    """Run, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--names", nargs="*", default=sorted(ARCHITECTURES))
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    draws = random.Random(arguments.seed)
    counts: dict[tuple[str, str, str], list[int]] = {}
    short = Table("What verify got wrong", {"architecture": "", "planted": "", "recipe": "", "said": ""})
    for index, name in enumerate(arguments.names):
        torch.manual_seed(arguments.seed)
        _, model, batch = build(name)
        plants = [nothing, RIGHT[1 + index % 3], *FAULTS] if _layers(model) else [nothing]
        for plant in plants:
            planted = copy.deepcopy(model)
            plant(planted, draws)
            for recipe in FAULTS.get(plant, RECIPES):
                word = said(planted, batch, recipe)
                good = (word == "passed") != (plant in FAULTS)
                kind = "fault" if plant in FAULTS else "right"
                cell = counts.setdefault((kind, plant.__doc__.removeprefix("Right: "), recipe), [0, 0])
                cell[0] += good
                cell[1] += 1
                print(name, plant.__name__, recipe, word[:160], flush=True)
                if not good:
                    short.add(architecture=name, planted=plant.__name__, recipe=recipe, said=word[:400])
    table = Table("Models and plants", {"kind": "", "what": "", "recipe": "", "as it must be": "", "of": ""})
    for (kind, what, recipe), (good, of) in sorted(counts.items()):
        table.add(kind=kind, what=what, recipe=recipe, **{"as it must be": good, "of": of}, met=good == of)
    result = Result("verify", "verify on right and wrong models", TEXT, "python -m benchmarks.bench_verify")
    result.tables += [table, short]
    save(result)


if __name__ == "__main__":
    main()
