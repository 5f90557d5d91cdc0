"""Peak memory of a training step, tensor by tensor: `python -m benchmarks.bench_memory`. A minute."""

import gc

from ._results import Result, Table, save

TITLE = "Peak memory of a step"
TEXT = """Linear layers in bfloat16, AdamW; the most bytes of tensors that live at once in the third forward, backward \
and step, less the activations that forward has left, per parameter. Every result of an operator is followed until its \
memory is free; what NumPy holds beside is below 0.01 bytes. A gradient is 2 bytes, so that one of the largest tensor \
is "2 x share"."""
WIDTH, LAYERS = 768, 16
CASES = {
    "after backward": ({"weight_update": "split8", "state_dtype": "8bit"}, None),
    "released": ({"weight_update": "split8", "state_dtype": "8bit"}, {}),
    "released, 4-bit states": ({"weight_update": "split8", "state_dtype": "4bit"}, {}),
    "released, stochastic, 4-bit states": ({"weight_update": "stochastic", "state_dtype": "4bit"}, {}),
}
SLACK = 0.05


def meter():
    """A mode that follows the memory of every operator's results, and its most bytes at once."""
    import torch
    from torch.multiprocessing.reductions import StorageWeakRef
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Meter(TorchDispatchMode):
        def __init__(self, tensors):
            super().__init__()
            self.held, self.peak = {}, 0
            self.add(tensors)

        def add(self, tensors):
            for tensor in tensors:
                storage = tensor.untyped_storage()
                if storage._cdata not in self.held or self.held[storage._cdata][0].expired():
                    self.held[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
            self.peak = max(self.peak, self.now())

        def now(self):
            self.held = {key: one for key, one in self.held.items() if not one[0].expired()}
            return sum(size for _, size in self.held.values())

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            self.add(x for x in tree_leaves(result) if isinstance(x, torch.Tensor))
            return result

    return Meter


def peak(options: dict, release: dict | None) -> tuple[float, float]:
    """Bytes per parameter at the peak, and between steps."""
    import torch

    import halfulp as hu

    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]).bfloat16()
    count = sum(parameter.numel() for parameter in model.parameters())

    def make(parameters):
        return hu.AdamW(parameters, lr=1e-4, **options)

    released = None if release is None else hu.optim.release_gradients(model, make, **release)
    optimizer = make(model.named_parameters()) if released is None else released.optimizer

    def forward():
        return model(torch.ones(1, WIDTH, dtype=torch.bfloat16)).float().square().mean()

    def step(loss):
        if released is not None:
            released.backward(loss)
            return
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        step(forward())
    gc.collect()
    held = [*model.parameters()]
    held += [x for state in optimizer.state.values() for x in state.values() if isinstance(x, torch.Tensor)]
    with meter()(held) as live:
        between = live.now()
        loss = forward()
        activations = live.now() - between
        live.peak = 0
        step(loss)
    return (live.peak - activations) / count, between / count


def main() -> None:
    """Every case."""
    import torch

    torch.set_num_threads(1)
    share = 1 / LAYERS
    table = Table("Bytes per parameter", {"case": "", "between steps": ".3f", "peak": ".3f", "bar": ""})
    for case, (options, release) in CASES.items():
        most, between = peak(options, release)
        bar = None if release is None else between + 2 * share + SLACK
        judged = {} if bar is None else {"bar": f"{bar:.3f}: {between:.3f} + 2 x {share:.4f} + {SLACK}"}
        table.add(
            case=case, **{"between steps": between}, peak=most, **judged, met=None if bar is None else most <= bar
        )
    save(Result("memory", TITLE, TEXT, "python -m benchmarks.bench_memory", tables=[table]))


if __name__ == "__main__":
    main()
