"""Formulas written by hand, scaled, against autocast: `python -m benchmarks.bench_formulas`."""

import argparse
import contextlib
import copy
import json
import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from ._results import Result, Table, save
from .formulas import FORMULAS, Formula

TEXT = """A linear layer and a formula of its outputs that public training code writes by hand, as they are there: the \
loss and the gradients of all parameters, against float64 from the same float16 start. The error is the \
larger of the loss's and of all gradients', the largest over two widths of the layer's outputs (about 1, and \
about 6) and {seeds} draws. autocast: the better of float16 (with a loss scale) and bfloat16, under the \
operator list of CPUs and that of CUDA. Scaled: `hu.scalify(model)`, eagerly; compiled ({backend}, the wider \
outputs of the first draw); and blind, where no rule looks at a value, as on an accelerator. `none`: eagerly \
with `wide="none"`. The bar is 4 times autocast's error, or float16's own half ulp if that is more, and no \
number that is not finite where float32's is."""
GAINS = (1.0, 6.0)
LEAST = 2.0**-12
BAR = 4.0
MODES = ("eager", "compiled", "blind", "none")


class Net(nn.Module):
    """A linear layer, its parameters beside those of a formula."""

    def __init__(self, formula: Formula, gain: float) -> None:
        super().__init__()
        self.formula = formula
        self.layer = nn.Linear(32, 32)
        self.v, self.s = nn.Parameter(1 + 0.1 * torch.randn(32)), nn.Parameter(torch.ones(1))
        self.w = nn.Parameter(torch.randn(32, 32) / 32**0.5)
        with torch.no_grad():
            self.layer.weight.copy_(torch.randn(32, 32) * gain / 32**0.5)
            for p in self.parameters():
                p.copy_(p.half())

    def forward(self, x: Tensor, d: Any) -> Tensor:
        """The loss."""
        return self.formula.loss(self.layer(x), self, d)


def data(seed: int) -> tuple[Tensor, SimpleNamespace]:
    """The layer's inputs, and a formula's plain data."""
    made = torch.Generator().manual_seed(seed)
    normal, uniform = torch.randn(16, 32, generator=made), torch.rand(16, 32, generator=made)
    classes = torch.randint(0, 32, (16,), generator=made)
    x, r = torch.randn(16, 32, generator=made).half().float(), torch.randn(16, generator=made)
    return x, SimpleNamespace(t=normal, u=uniform, y=classes, m=uniform > 0.5, r=r)


_FLOAT32 = {
    *("acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log1p", "log2", "reciprocal", "rsqrt", "sinh"),
    *("tan", "pow", "__pow__", "__rpow__", "__rdiv__", "__rtruediv__", "softplus", "layer_norm", "group_norm", "norm"),
    *("cosine_similarity", "poisson_nll_loss", "cosine_embedding_loss", "nll_loss", "hinge_embedding_loss", "kl_div"),
    *("l1_loss", "smooth_l1_loss", "huber_loss", "mse_loss", "margin_ranking_loss", "multilabel_margin_loss"),
    *("soft_margin_loss", "triplet_margin_loss", "multi_margin_loss", "binary_cross_entropy_with_logits", "dist"),
    *("pdist", "cdist", "renorm", "logsumexp", "softmin", "softmax", "log_softmax", "prod", "cumprod", "cumsum", "sum"),
    *("ctc_loss", "logsigmoid", "cross_entropy", "slogdet", "linalg_slogdet", "logcumsumexp", "digamma", "lgamma"),
    "i0",
}
_NARROW = {
    *("linear", "matmul", "__matmul__", "mm", "bmm", "mv", "addmm", "baddbmm", "einsum"),
    "scaled_dot_product_attention",
}


class CudaLists(TorchFunctionMode):
    """torch.autocast's lists for CUDA on any device."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __torch_function__(self, function: Any, types: Any, arguments: tuple = (), options: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        to = torch.float32 if name in _FLOAT32 else self.dtype if name in _NARROW else None
        options = options or {}
        if to is not None:
            arguments, options = tree_map(lambda x: self._cast(x, to), (arguments, options))
        return function(*arguments, **options)

    @staticmethod
    def _cast(x: Any, to: torch.dtype) -> Any:
        return x.to(to) if isinstance(x, Tensor) and x.is_floating_point() else x


@contextlib.contextmanager
def blind() -> Iterator[None]:
    """Rules that look at no value, as those of tensors on an accelerator."""
    from halfulp.scaled import _powers_of_two as _powers

    with mock.patch.object(_powers, "has_readable_values", return_value=False):
        yield


def run(net: nn.Module, x: Tensor, d: Any, context: Any = None, scale: float = 1.0) -> list[Tensor]:
    """The loss and the gradient of every parameter, in float64; zeros where it has none."""
    with context or contextlib.nullcontext():
        loss = net(x, d)
    (loss * scale).backward()
    found = [p.grad for p in net.parameters()]
    values = [loss.detach(), *(torch.zeros(p.shape) if g is None else g for g, p in zip(found, net.parameters()))]
    values = [v.decode(torch.float64) if hasattr(v, "decode") else v.double() for v in values]
    return [values[0].reshape(1), torch.cat([v.flatten() for v in values[1:]]) / scale]


def error(found: list[Tensor], wanted: list[Tensor]) -> float:
    """The larger of two relative errors; infinite for what is not finite."""
    if not all(v.isfinite().all() for v in found):
        return math.inf
    return max(((a - b).norm() / b.norm().clamp(min=1e-30)).item() for a, b in zip(found, wanted))


def autocast_error(net: nn.Module, x: Tensor, d: Any, wanted: list[Tensor]) -> float:
    """The smallest over formats and lists; infinite where none gives finite numbers."""
    errors = [math.inf]
    for dtype, scale in ((torch.bfloat16, 1.0), (torch.float16, 1.0), (torch.float16, 2.0**10)):
        for context in (torch.autocast("cpu", dtype), CudaLists(dtype)):
            with contextlib.suppress(RuntimeError, NotImplementedError):  # an operator that has no such kernel
                errors.append(error(run(copy.deepcopy(net), x, d, context, scale), wanted))
    return min(errors)


def scaled_error(mode: str, net: nn.Module, x: Tensor, d: Any, wanted: list[Tensor], backend: str) -> float:
    """Of the scaled model."""
    import halfulp as hu

    model = hu.scalify(copy.deepcopy(net), wide="none" if mode == "none" else "autocast")
    if mode == "compiled":
        torch._dynamo.reset()
        model.compile(backend=backend)
    with blind() if mode == "blind" else contextlib.nullcontext():
        return error(run(model, x, d), wanted)


def measure(
    formula: Formula,
    seed: int,
    modes: tuple[str, ...] = MODES,
    backend: str = "aot_eager",
    gains: tuple[float, ...] = GAINS,
) -> list[dict]:
    """One formula at each width: errors of autocast and of every mode; whether plain float32 is finite."""
    rows = []
    for gain in gains:
        torch.manual_seed(seed)
        net = Net(formula, gain)
        x, d = data(seed)
        exact = SimpleNamespace(**{k: v.double() if v.is_floating_point() else v for k, v in vars(d).items()})
        with _defaults(torch.float64):
            wanted = run(copy.deepcopy(net).double(), x.double(), exact)
        plain = run(copy.deepcopy(net), x, d)
        row = {"gain": gain, "finite": all(v.isfinite().all().item() for v in plain), "float32": error(plain, wanted)}
        row["autocast"] = autocast_error(net, x, d, wanted)
        for mode in modes:
            if mode != "compiled" or gain == gains[-1]:
                row[mode] = scaled_error(mode, net, x, d, wanted, backend)
        rows.append(row)
    return rows


@contextlib.contextmanager
def _defaults(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def ratio(rows: list[dict], mode: str) -> float:
    """The largest of a mode's errors over autocast's; infinite for a number that is not finite where float32's is."""
    kept = [row for row in rows if row["finite"] and mode in row]
    return max((row[mode] / max(min(row["autocast"], 1e30), LEAST) for row in kept), default=0.0)


def table_of(raw: dict[str, list[dict]], modes: list[str]) -> Table:
    """One row for a formula: the largest errors, and the largest ratio of what the bar is on."""
    columns = {"formula": "", "from": "", "float32": ".0e", "autocast": ".1e", **dict.fromkeys(modes, ".1e")}
    table = Table(f"{len(raw)} formulas", {**columns, "x autocast": ".1f", "met": ""})
    for name, rows in raw.items():
        kept = [row for row in rows if row["finite"]]
        cells = {key: max(row.get(key, 0.0) for row in kept) for key in ("float32", "autocast", *modes)}
        cells = {key: value if math.isfinite(value) else "not finite" for key, value in cells.items()}
        worst = max(ratio(rows, mode) for mode in modes if mode != "none")
        table.add(
            **{"formula": name, "from": FORMULAS[name].source}, **cells, **{"x autocast": worst}, met=worst <= BAR
        )
    return table


def main() -> None:
    """Measures all or some, prints them; all are saved."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="of formulas; all by default")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--backend", default="aot_eager", choices=("aot_eager", "inductor"))
    parser.add_argument("--modes", nargs="*", default=list(MODES), choices=MODES)
    parser.add_argument("--keep", type=Path, help="a JSON file for the raw rows, from which a second call goes on")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    raw = json.loads(arguments.keep.read_text()) if arguments.keep and arguments.keep.exists() else {}
    for name in arguments.names or FORMULAS:
        if name not in raw:
            raw[name] = []
            for seed in range(arguments.seeds):
                modes = tuple(mode for mode in arguments.modes if not seed or mode != "compiled")
                raw[name] += measure(FORMULAS[name], seed, modes, arguments.backend)
            if arguments.keep:
                arguments.keep.write_text(json.dumps(raw, indent=1))
        print(f"{name:34}", *(f"{mode} {ratio(raw[name], mode):7.2f}" for mode in arguments.modes), flush=True)
    if arguments.names or set(arguments.modes) != set(MODES):
        return
    text = TEXT.format(seeds=arguments.seeds, backend=arguments.backend)
    command = "python -m benchmarks.bench_formulas"
    save(Result("formulas", "Formulas written by hand", text, command, tables=[table_of(raw, arguments.modes)]))


if __name__ == "__main__":
    main()
