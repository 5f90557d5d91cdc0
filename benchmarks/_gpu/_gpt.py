"""The GPT of the parts on memory and tensors with scales: 12 layers, fused attention, 124 million parameters."""

from __future__ import annotations

from ._run import Run

SIZES = {"vocabulary": 50_304, "width": 768, "layers": 12, "heads": 12, "time": 1024}
BATCH = 8
TINY = {"vocabulary": 32, "width": 32, "layers": 1, "heads": 2, "time": 16}
TINY_BATCH = 2


def sizes(run: Run) -> tuple[dict, int]:
    """The model's sizes, and the rows of a batch."""
    return (TINY, TINY_BATCH) if run.tiny else (SIZES, BATCH)


def describe(run: Run) -> str:
    """The sizes in words."""
    made, batch = sizes(run)
    return f"GPT of {made['layers']} layers of width {made['width']}, fused attention, {batch} x {made['time']} tokens"


def model_and_batch(run: Run):
    """A fresh float32 model on the device, and a batch of token ids; the same at every call."""
    import torch

    from halfulp.trials.tasks._text import GPT

    made, batch = sizes(run)
    torch.manual_seed(0)
    with torch.device(run.device):
        model = GPT(
            made["vocabulary"],
            width=made["width"],
            layers=made["layers"],
            heads=made["heads"],
            time=made["time"],
            fused=True,
        )
    generator = torch.Generator().manual_seed(1)
    # Tokens that follow from those before, so that there is something to learn.
    ids = torch.randint(0, made["vocabulary"], (batch, 1), generator=generator)
    steps = torch.randint(1, 4, (batch, made["time"]), generator=generator).cumsum(1)
    ids = torch.cat([ids, ids + steps], 1) % made["vocabulary"]
    ids = ids.to(run.device)
    return model, (ids[:, :-1], ids[:, 1:])


def loss_of(model, batch):
    """The mean cross-entropy, in float32."""
    from torch.nn import functional

    inputs, targets = batch
    return functional.cross_entropy(model(inputs).flatten(0, 1).float(), targets.flatten())
