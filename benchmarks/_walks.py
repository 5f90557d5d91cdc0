"""The files of the library that one call goes through, each with the calls of its functions."""

import sys
from collections.abc import Callable, Iterator
from types import FrameType

from ._results import Table

# The most files that a walk may go through.
BARS = {
    "AdamW step": 10,
    "scaled matrix product": 7,
    "scaler, ordinary iteration": 10,
    "scaler, measured iteration": 10,
    "observe, sampled step": 12,
}


def files_of(call: Callable[[], object]) -> dict[str, int]:
    """Return the files that a call enters, with how many calls of their functions each takes."""
    found: dict[str, int] = {}

    def note(frame: FrameType, event: str, _: object) -> None:
        _, inside, path = frame.f_code.co_filename.rpartition("/src/halfulp/")
        if event == "call" and inside:
            found[path] = found.get(path, 0) + 1

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


def walk_adamw() -> Iterator[dict[str, int]]:
    """Yield the walk of a native AdamW step of bfloat16 weights, kernels compiled."""
    import torch

    import halfulp as hu

    weight = torch.nn.Parameter(torch.ones(4, 8, dtype=torch.bfloat16))
    optimizer = hu.optim.AdamW([weight], weight_update="split")
    for _ in range(5):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    yield files_of(optimizer.step)


def walk_scaled_product() -> Iterator[dict[str, int]]:
    """Yield the walk of a product of two ScaledTensors."""
    import torch

    import halfulp as hu

    a, b = (hu.ScaledTensor.encode(torch.randn(8, 8)) for _ in range(2))
    a @ b
    yield files_of(lambda: a @ b)


def walk_scaler() -> Iterator[dict[str, int]]:
    """Yield the walks of an ordinary and a measured iteration of the scaler under autocast to float16."""
    import torch

    import halfulp as hu

    model = torch.nn.Sequential(*(layer for _ in range(3) for layer in (torch.nn.Linear(8, 8), torch.nn.Tanh())))
    scaler, optimizer = hu.AdaptiveGradScaler(model), torch.optim.SGD(model.parameters(), lr=0.1)

    def iterate() -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            out = model(torch.ones(4, 8))
        scaler.scale(out.float().square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()

    for _ in range(60):
        iterate()
    for measured in (False, True):
        while scaler._controller.backward.is_measuring is not measured:
            iterate()
        yield files_of(iterate)


def walk_observe() -> Iterator[dict[str, int]]:
    """Yield the walk of a sampled step of observe, backward pass included: the one of eight that takes most calls."""
    import torch

    import halfulp as hu

    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8)).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def iterate() -> None:
        optimizer.zero_grad()
        model(torch.ones(4, 8, dtype=torch.bfloat16)).float().square().mean().backward()
        optimizer.step()

    with hu.observe(model, optimizer, interval=4):
        for _ in range(16):
            iterate()
        yield max((files_of(iterate) for _ in range(8)), key=lambda files: sum(files.values()))


def walk_all() -> Table:
    """Return a table of all walks beside their bars."""
    table = Table("Walks", dict.fromkeys(("call", "files", "calls", "which", "bar", "met"), ""))
    walks = (walk for part in (walk_adamw, walk_scaled_product, walk_scaler, walk_observe) for walk in part())
    for (name, most), files in zip(BARS.items(), walks, strict=True):
        which = ", ".join(f"{path} ({calls})" for path, calls in files.items())
        calls = sum(files.values())
        table.add(call=name, files=len(files), calls=calls, which=which, bar=f"at most {most}", met=len(files) <= most)
    return table
