"""What `format=` rounds in a compiled graph beside eager mode: `python -m benchmarks.bench_compiled_formats`."""

import argparse
import json
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ._harness import ROOT, set_threads
from ._results import Result, Table, save

TEXT = """Every architecture of tests/gradients/models/architectures.py, tiny, with random weights, under \
`hu.AdaptiveGradScaler(model, format="e5m2")` and random exponents from 2 to 10: the gradients of all parameters, \
compiled (aot_eager), against those of eager mode, bit for bit. Gradients that meet in one tensor are added in another \
order where a graph is compiled, which may take a sum to the other of two neighbours in the format: up to 1% of the \
elements of a parameter may differ. Where more do, or the model is not compiled, the reason is said."""
MOST = 0.01
# What is not the same, and why.
_BROKEN = "the graph breaks and leaves a part uncompiled, which format= refuses"
_APART = "the graph breaks: between its parts gradients have the global exponent"
_PATH = "transformers takes another path where it is compiled"
REASONS = {
    **dict.fromkeys(("gru", "lstm", "rnn", "switch"), _BROKEN),
    **dict.fromkeys(("hf-llama", "hf-mamba"), _PATH),
    **{"hf-wav2vec2": _APART, "hf-mixtral": f"{_PATH}, and {_APART}"},
}


def _plain_attention(model: Any) -> None:
    model.set_attn_implementation("eager")


def _no_scan(model: Any) -> None:
    for module in model.modules():
        if hasattr(module, "use_associative_scan"):
            module.use_associative_scan = False


# transformers' models, on a path that is one for both.
ONE_PATH: dict[str, Callable[[Any], None]] = {"hf-llama": _plain_attention, "hf-mamba": _no_scan}
_SAME = ", on one path"


def both(name: str, seed: int) -> list[dict]:
    """The gradients by name, eager and compiled, with the same exponents: the state of the first."""
    import torch
    from tests.gradients.models.architectures import build

    import halfulp as hu

    def gradients() -> dict:
        torch.manual_seed(seed)
        case.model.zero_grad()
        out = run(**case.batch) if isinstance(case.batch, dict) else run(*case.batch)
        scaler.scale(case.loss(out)).backward()
        named = [(key, p) for key, p in case.model.named_parameters() if p.grad is not None]
        return {key: p.grad / scaler.get_scale() for key, p in named}

    found, state = [], None
    for compiled in (False, True):
        case = build(name.removesuffix(_SAME), seed)
        if name.endswith(_SAME):
            ONE_PATH[name.removesuffix(_SAME)](case.model)
        scaler = hu.AdaptiveGradScaler(case.model, init_scale=2.0**8, format="e5m2")
        compiler = scaler.backend("aot_eager")
        run = torch.compile(case.model, backend=compiler, dynamic=False) if compiled else case.model
        gradients()
        draw = random.Random(seed)
        scaler.set_exponents({one.site: draw.randint(2, 10) for one in scaler.sites()})
        state = state or scaler.state_dict()
        scaler.load_state_dict(state)
        found.append(gradients())
    return found


def row(name: str, seed: int) -> dict:
    """One architecture."""
    import torch

    torch._dynamo.reset()
    reason = REASONS.get(name, "")
    try:
        eager, compiled = both(name, seed)
    except Exception as error:
        told = reason or " ".join(str(error).split())[:120]
        return {"architecture": name, "reason": told, "bar": "", "met": None if reason else False}
    shares = [
        ((compiled[key] != g) & ~(compiled[key].isnan() & g.isnan())).double().mean().item() for key, g in eager.items()
    ]
    same = sum(share == 0 for share in shares)
    cells = {"parameters": len(shares), "same bits": same, "most": max(shares), "reason": reason}
    met = eager.keys() == compiled.keys() and max(shares) <= MOST
    return {"architecture": name, **cells, "bar": f"<= {MOST:.0%}", "met": None if reason else met}


def main() -> None:
    """All architectures, or those that are named, which are only printed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--keep", type=Path, help="a JSON file for the rows, from which a second call goes on")
    arguments = parser.parse_args()
    set_threads(1)
    warnings.simplefilter("ignore")
    import sys

    sys.path.insert(0, str(ROOT))
    from tests.gradients.models.architectures import ARCHITECTURES, HF

    columns = {"architecture": "", "parameters": "", "same bits": "", "most": ".2%", "reason": "", "bar": "", "met": ""}
    table = Table("Gradients with format=, compiled beside eager", columns)
    all_names = [*sorted(ARCHITECTURES), *(f"hf-{name}" for name in HF), *(f"{name}{_SAME}" for name in ONE_PATH)]
    rows = json.loads(arguments.keep.read_text()) if arguments.keep and arguments.keep.exists() else {}
    for name in arguments.names or all_names:
        if name not in rows:
            rows[name] = row(name, arguments.seed)
            print(rows[name], flush=True)
            if arguments.keep:
                arguments.keep.write_text(json.dumps(rows, indent=1))
        table.add(**rows[name])
    if not arguments.names:
        command = "python -m benchmarks.bench_compiled_formats"
        save(Result("compiled_formats", "Compiled roundings of gradients", TEXT, command, tables=[table]))


if __name__ == "__main__":
    main()
