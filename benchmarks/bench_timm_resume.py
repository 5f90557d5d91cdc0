"""timm's optimizers under hu.optim.wrap, interrupted and resumed: `python -m benchmarks.bench_timm_resume FOLDER`.

FOLDER holds timm's package (its wheel, unpacked); its models, and so torchvision, are not needed.
"""

import argparse
import copy
import functools
import sys
import types
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

import halfulp as hu

from ._results import Result, Table, save

TEXT = (
    "Four steps of bfloat16 weights under Kahan, saved, loaded into a new optimizer, five more on both: the same bits."
)


def optimizers(folder: Path) -> dict[str, Callable[[], type]]:
    """What gives timm's optimizers, by name, without its models."""
    for name, path in (("timm", [str(folder / "timm")]), ("timm.models", [])):
        module = types.ModuleType(name)
        module.__path__ = path
        module.group_parameters = module.group_modules = None
        sys.modules[name] = module
    from timm.optim import get_optimizer_class, list_optimizers

    return {name: functools.partial(get_optimizer_class, name) for name in list_optimizers()}


def model() -> torch.nn.Module:
    """A small network in bfloat16, the same at every call."""
    torch.manual_seed(0)
    layers = torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)
    return torch.nn.Sequential(*layers).bfloat16()


def steps(net: torch.nn.Module, optimizer: torch.optim.Optimizer, numbers: range) -> None:
    """Steps on batches that follow from their numbers."""
    for number in numbers:
        torch.manual_seed(100 + number)
        optimizer.zero_grad()
        net(torch.randn(4, 6).bfloat16()).float().square().mean().backward()
        optimizer.step()


def resumed(find: Callable[[], type], **options: float) -> str:
    """ "equal", "DIFFERENT", or why it is refused."""

    def wrapped(net: torch.nn.Module) -> torch.optim.Optimizer:
        base = find()
        return hu.optim.wrap(base, net.named_parameters(), lr=1e-2, weight_update="kahan", **options)

    try:
        net = model()
        optimizer = wrapped(net)
        steps(net, optimizer, range(4))
        other = model()
        other.load_state_dict(copy.deepcopy(net.state_dict()))
        again = wrapped(other)
        again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for each in ((net, optimizer), (other, again)):
            steps(*each, range(4, 9))
    except (AssertionError, NotImplementedError, RuntimeError, ValueError) as error:
        if "requires a momentum" in str(error) and not options:
            return resumed(find, momentum=0.9)
        return " ".join(str(error).split())[:160]
    pairs = zip(net.parameters(), other.parameters(), strict=True)
    return "equal" if all(torch.equal(a, b) for a, b in pairs) else "DIFFERENT"


def main() -> None:
    """Run all, print and save the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found = {name: resumed(find) for name, find in optimizers(parser.parse_args().folder).items()}
    table = Table("timm's optimizers, resumed", {"outcome": "", "optimizers": "", "names": ""})
    for outcome in dict.fromkeys(sorted(found.values(), key=lambda said: (said != "equal", said))):
        names = [name for name, said in found.items() if said == outcome]
        met = None if outcome not in ("equal", "DIFFERENT") else outcome == "equal"
        table.add(outcome=outcome, optimizers=len(names), names=", ".join(names), met=met)
    command = "python -m benchmarks.bench_timm_resume FOLDER"
    save(Result("timm_resume", "Wrapped optimizers of timm", TEXT, command, tables=[table]))


if __name__ == "__main__":
    main()
