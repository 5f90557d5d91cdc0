"""What the peers' arithmetic does to a run, and what halfulp's does: `python -m benchmarks.bench_peers`."""

import argparse
from collections.abc import Callable

from . import _claims, peers
from ._harness import set_threads
from ._results import Result, Table, save

TEXT = """Four ways in which installed peers silently change a training run, each reproduced by running the peer, \
with float32's figure (torch.optim or exact arithmetic) and halfulp's beside it. Settings are the ones under which a \
user meets them; nothing is tuned to hurt."""


def optimi_kahan(params, **settings):
    """optimi's AdamW with Kahan summation."""
    import optimi

    return optimi.AdamW(params, kahan_sum=True, triton=False, **settings)


def torchao_stochastic(params, **settings):
    """torchao's AdamW with stochastic rounding of bf16 weights."""
    from torchao.optim.adam import _AdamW

    return _AdamW(params, bf16_stochastic_round=True, **settings)


def heavyball_stochastic(params, **settings):
    """HeavyBall's AdamW: stochastic rounding on every bf16 store."""
    import heavyball

    return heavyball.AdamW(params, consume_grad=False, **settings)


def torch_bf16(params, **settings):
    """torch's own AdamW on bf16 parameters."""
    import torch

    return torch.optim.AdamW(params, fused=True, **settings)


def halfulp_with(update: str, state="bf16") -> Callable:
    """halfulp's AdamW under one weight update."""

    def make(params, **settings):
        import torch

        import halfulp as hu

        states = torch.bfloat16 if state == "bf16" else state
        return hu.optim.AdamW(params, weight_update=update, state_dtype=states, **settings)

    return make


MAKERS = {
    "torch bf16 (nearest)": torch_bf16,
    "torchao stochastic": torchao_stochastic,
    "optimi kahan": optimi_kahan,
    "heavyball stochastic": heavyball_stochastic,
    "halfulp stochastic": halfulp_with("stochastic"),
    "halfulp kahan": halfulp_with("kahan"),
    "halfulp split8, 8-bit states": halfulp_with("split8", "8bit"),
}


def attempt(call: Callable) -> tuple[object, str]:
    """A peer's answer, or why there is none."""
    try:
        return call(), ""
    except Exception as error:  # a peer that cannot run is reported, never faked
        return None, f"cannot: {type(error).__name__}: {error}".splitlines()[0][:120]


def decay_table() -> Table:
    """Weight decay over 2,000 steps without a gradient."""
    table = Table(
        "Weight decay after 2,000 steps at lr 1e-3, wd 0.1, zero gradient",
        {"optimizer": "", "sum(w sign w0) / sum|w0|": ".4f", "wanted": ".4f", "note": ""},
        note="(1 - 1e-4)^2000 = 0.8187 of the weight is left in exact arithmetic; 1.0 means that no decay happened.",
    )
    for name, make in MAKERS.items():
        value, why = attempt(lambda make=make: _claims.decay(make))
        table.add(optimizer=name, **{"sum(w sign w0) / sum|w0|": value, "wanted": 0.8187, "note": why})
    return table


def moment_table() -> Table:
    """The second moment after a tenfold drop of the gradients."""
    table = Table(
        "sqrt(v) against float32's, beta2 = 0.999, 3,000 steps after the gradients dropped tenfold",
        {"optimizer": "", "ratio": ".3f", "wanted": ".3f", "note": ""},
        note="A ratio of 4 means that the learning rate is silently 4 times too small.",
    )
    for name, make in MAKERS.items():
        value, why = attempt(lambda make=make: _claims.second_moment(make, 0.999, before=3000, after=3000)[-1][0])
        table.add(optimizer=name, ratio=value, wanted=1.0, note=why)
    return table


def bits_of(x) -> str:
    """A float32 scalar's bits."""
    import torch

    return f"0x{int(x.view(torch.int32)) & 0xFFFFFFFF:08X} ({float(x):g})"


def nan_table() -> Table:
    """Stochastic rounding of not-a-number to bf16."""
    import torch
    from torch import tensor

    import halfulp as hu

    words = {
        "0x7FFFFFFF": 0x7FFFFFFF,
        "0x7F800001": 0x7F800001,
        "0x7F800000": 0x7F800000,
        "0xFFC00000": 0xFFC00000 - 2**32,
    }
    rows = {"halfulp": lambda x: hu.quantize(x, "bf16", hu.Stochastic(seed=0))}
    if peers.missing("torchao") is None:
        from torchao.optim.quant_utils import _fp32_to_bf16_sr

        rows["torchao"] = lambda x: _fp32_to_bf16_sr(x).float()
    if peers.missing("heavyball") is None:
        from heavyball.utils import stochastic_round_

        rows["heavyball"] = lambda x: stochastic_round_(torch.empty_like(x, dtype=torch.bfloat16), x).float()
    if peers.missing("qtorch") is None:
        from qtorch.quant import float_quantize

        rows["QPyTorch"] = lambda x: float_quantize(x, exp=8, man=7, rounding="stochastic")
    table = Table(
        "NaN and infinity under stochastic rounding to bf16",
        {"input": "", **dict.fromkeys(rows, "")},
        note="0x7FFFFFFF is the NaN that CUDA makes, 0x7F800001 a signalling NaN, 0x7F800000 infinity.",
    )
    for title, word in words.items():
        x = tensor([word], dtype=torch.int32).view(torch.float32)
        cells = {}
        for name, call in rows.items():
            value, why = attempt(lambda call=call, x=x: bits_of(call(x.repeat(64))[0]))
            cells[name] = value or why
        table.add(input=title, **cells)
    return table


def nearest_table() -> Table:
    """Nearest rounding: ties, specials and overflow."""
    import torch

    import halfulp as hu

    table = Table(
        "Nearest rounding of all fp16 values to bf16, and of special values",
        {"what": "", "QPyTorch": "", "torch": "", "halfulp": ""},
        note="QPyTorch documents round to nearest even.",
    )
    absent = peers.missing("qtorch")
    if absent:
        table.add(what="all", QPyTorch=absent)
        return table
    from qtorch.quant import float_quantize

    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    finite = every[every.isfinite()]
    wanted = finite.bfloat16().float()
    rival = float_quantize(finite, exp=8, man=7, rounding="nearest")
    mine = hu.quantize(finite, "bf16")
    share = {"QPyTorch": (rival != wanted).double().mean(), "halfulp": (mine != wanted).double().mean()}
    table.add(what="fp16 values rounded wrongly to bf16", torch="0", **{k: f"{100 * v:.2f}%" for k, v in share.items()})
    cases = {
        "1 + 2^-8 to bf16 (a tie)": (1 + 2.0**-8, "bf16", torch.bfloat16, (8, 7)),
        "NaN to e5m2": (float("nan"), "e5m2", torch.float8_e5m2, (5, 2)),
        "infinity to e5m2": (float("inf"), "e5m2", torch.float8_e5m2, (5, 2)),
        "60000 to e5m2 (largest: 57344)": (60000.0, "e5m2", torch.float8_e5m2, (5, 2)),
        "1e5 to e5m2": (1e5, "e5m2", torch.float8_e5m2, (5, 2)),
        "-0.0 to e5m2": (-0.0, "e5m2", torch.float8_e5m2, (5, 2)),
    }
    for what, (value, form, dtype, (exponent, mantissa)) in cases.items():
        x = torch.tensor([value])
        table.add(
            what=what,
            QPyTorch=f"{float(float_quantize(x, exp=exponent, man=mantissa, rounding='nearest')):g}",
            torch=f"{float(x.to(dtype).float()):g}",
            halfulp=f"{float(hu.quantize(x, form)):g}",
        )
    return table


def compile_table() -> Table:
    """Kahan summation under torch.compile."""
    table = Table(
        "torch.compile of the step: error of weight + residual against float32, over the size of the whole update",
        {"optimizer": "", "eager": ".4f", "compiled": ".4f", "note": ""},
        note="20 steps of AdamW at lr 1e-5 on 65,536 weights near 0.02; 1.0 means that nothing was kept.",
    )
    for name in ("optimi kahan", "halfulp kahan"):
        cells, notes = {}, []
        for mode in ("eager", "compiled"):
            cells[mode], why = attempt(
                lambda mode=mode, name=name: _claims.compiled_error(MAKERS[name], mode == "compiled")
            )
            notes.append(why)
        table.add(optimizer=name, note="; ".join(filter(None, notes)), **cells)
    return table


def main() -> None:
    """Everything."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    set_threads(1)
    tables = [decay_table(), moment_table(), nan_table(), nearest_table(), compile_table()]
    for table in tables[:2]:
        table.note += (
            " Peers: " + ", ".join(f"{name} {text.split(' (')[0]}" for name, text in peers.status().items()) + "."
        )
    save(Result("peers", "What the peers' rounding does", TEXT, "python -m benchmarks.bench_peers", tables=tables))


if __name__ == "__main__":
    main()
