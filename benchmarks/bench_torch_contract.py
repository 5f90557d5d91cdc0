"""torch's own list of optimizer inputs, run with halfulp's classes: `python -m benchmarks.bench_torch_contract`."""

import copy
import io
import sys
import types
import unittest
import warnings
from collections.abc import Callable

import torch

import halfulp as hu

from ._results import Result, Table, save

# torch.testing's modules import it, and nothing here uses it.
sys.modules.setdefault("expecttest", types.SimpleNamespace(TestCase=unittest.TestCase))
TEXT = """torch.testing._internal.common_optimizers.optim_db: every input that torch tests SGD, Adam and AdamW with, \
on the CPU in float32, and every wrong one. For each input: five steps agree with torch's; the state_dict goes through \
a file with weights_only and the resumed run has the same parameters; the state_dict of torch's class is taken over; \
deepcopy goes on alike; a step without gradients does nothing; hooks run in torch's order. Each check is \
run on torch's class too."""
REASONS = {
    "differentiable": "the step writes in place and is not differentiable, which the error says",
    "capturable": "steps run outside CUDA graphs, which the error says",
}


def parameters(start: list | None = None) -> list:
    """Three parameters, or copies."""
    generator = torch.Generator().manual_seed(5)
    start = start or [torch.randn(shape, generator=generator) for shape in ((4, 3), (5,), ())]
    return [torch.nn.Parameter(tensor.detach().clone()) for tensor in start]


def steps(optimizer, params: list, first: int, count: int) -> list:
    """The parameters after some steps on gradients that follow from the step's number."""
    for step in range(first, first + count):
        generator = torch.Generator().manual_seed(step)
        for parameter in params:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    return params


def agree(one: list, two: list, exact: bool) -> bool:
    """Whether two lists of parameters are the same, or nearly."""
    close = torch.equal if exact else lambda a, b: torch.allclose(a, b, rtol=1e-4, atol=1e-5)
    return all(close(a.detach(), b.detach()) for a, b in zip(one, two, strict=True))


def agrees_with_torch(make: Callable, peer: Callable) -> bool:
    """Five steps."""
    one, two = parameters(), parameters()
    return agree(steps(make(one), one, 0, 5), steps(peer(two), two, 0, 5), exact=False)


def resumes(make: Callable, peer: Callable) -> bool:
    """Through a file."""
    one = parameters()
    optimizer = make(one)
    steps(optimizer, one, 0, 2)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    two = parameters(one)
    resumed = make(two)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    return agree(steps(optimizer, one, 2, 3), steps(resumed, two, 2, 3), exact=True)


def takes_torchs_state(make: Callable, peer: Callable) -> bool:
    """What torch's class has saved."""
    one = parameters()
    theirs = peer(one)
    steps(theirs, one, 0, 2)
    two = parameters(one)
    mine = make(two)
    mine.load_state_dict(copy.deepcopy(theirs.state_dict()))
    return agree(steps(theirs, one, 2, 3), steps(mine, two, 2, 3), exact=False)


def copies(make: Callable, peer: Callable) -> bool:
    """deepcopy of parameters and optimizer together."""
    one = parameters()
    optimizer = make(one)
    steps(optimizer, one, 0, 2)
    two, other = copy.deepcopy((one, optimizer))
    return agree(steps(optimizer, one, 2, 2), steps(other, two, 2, 2), exact=True)


def does_nothing_without_gradients(make: Callable, peer: Callable) -> bool:
    """No gradient, no change, and no state."""
    one = parameters()
    optimizer = make(one)
    optimizer.step()
    return agree(one, parameters(), exact=True) and not any(optimizer.state.values())


def runs_hooks(make: Callable, peer: Callable) -> bool:
    """Of step, state_dict and load_state_dict, in order."""
    one, seen = parameters(), []
    optimizer = make(one)
    optimizer.register_step_pre_hook(lambda *_: seen.append(1))
    optimizer.register_step_post_hook(lambda *_: seen.append(2))
    optimizer.register_state_dict_pre_hook(lambda opt: opt.state.update(test=1) or seen.append(3))
    optimizer.register_state_dict_post_hook(lambda *_: seen.append(4))
    optimizer.register_load_state_dict_pre_hook(lambda *_: seen.append(5))
    optimizer.register_load_state_dict_post_hook(lambda *_: seen.append(6))
    steps(optimizer, one, 0, 1)
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    return seen == [1, 2, 3, 4, 5, 6] and saved["state"]["test"] == 1


CHECKS = (agrees_with_torch, resumes, takes_torchs_state, copies, does_nothing_without_gradients, runs_hooks)


def passes(check: Callable, make: Callable, peer: Callable) -> str:
    """Empty, or why not."""
    try:
        return "" if check(make, peer) else "another result"
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]


def refuses(kind: type, entry) -> str:
    """Empty if a wrong input raises what torch raises, or why not."""
    try:
        kind(entry.optimizer_error_input.params, **entry.optimizer_error_input.kwargs)
    except (ValueError, TypeError, RuntimeError, NotImplementedError):
        return ""
    return "accepted"


def main() -> None:
    """Every input of every class that both have."""
    from torch.testing._internal.common_optimizers import optim_db

    warnings.simplefilter("ignore")
    counts = Table("Checks that pass", {"class": "", "check": "", "inputs": "d", "torch": "d", "halfulp": "d"})
    left = Table("What is left", {"class": "", "check": "", "input": "", "error": "", "reason": ""})
    for info in optim_db:
        name = info.optim_cls.__name__
        if not hasattr(hu.optim, name):
            continue
        theirs, mine = info.optim_cls, getattr(hu.optim, name)
        inputs = info.optim_inputs_func(device="cpu")
        for check in CHECKS:
            found = [0, 0]
            for entry in inputs:
                makers = [lambda p, kind=kind, entry=entry: kind(p, **entry.kwargs) for kind in (theirs, mine)]
                why = [passes(check, make, makers[0]) for make in makers]
                found = [count + (not reason) for count, reason in zip(found, why)]
                if why[1]:
                    reason = next((text for key, text in REASONS.items() if entry.kwargs.get(key)), "")
                    left.add(
                        **{"class": name, "check": check.__name__, "input": entry.desc, "error": why[1]}, reason=reason
                    )
            counts.add(**{"class": name, "check": check.__name__}, inputs=len(inputs), torch=found[0], halfulp=found[1])
        wrong = list(info.optim_error_inputs_func(device="cpu", dtype=torch.float32))
        wrong = [entry for entry in wrong if entry.error_on.name == "CONSTRUCTION_ERROR"]
        why = [refuses(mine, entry) for entry in wrong]
        for entry, reason in zip(wrong, why):
            if reason:
                left.add(
                    **{"class": name, "check": "refused", "input": entry.optimizer_error_input.desc, "error": reason}
                )
        refused = sum(not refuses(theirs, entry) for entry in wrong)
        counts.add(
            **{"class": name, "check": "wrong ones are refused"},
            inputs=len(wrong),
            torch=refused,
            halfulp=why.count(""),
        )
    save(
        Result(
            "torch_contract",
            "torch's optimizer inputs",
            TEXT,
            "python -m benchmarks.bench_torch_contract",
            tables=[counts, left],
        )
    )


if __name__ == "__main__":
    main()
