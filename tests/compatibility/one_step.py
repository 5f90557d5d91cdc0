"""One step of every system, run by an installed halfulp; prints a JSON document of what passed and what did not.

python one_step.py [folder for what compare writes]
"""

import json
import os
import platform
import subprocess
import sys
import tempfile
import traceback
import warnings

warnings.simplefilter("error")
# torch says this of one release of Python, whoever compiles.
warnings.filterwarnings("ignore", "Guards may run slower on Python 3.13.0")

import torch  # noqa: E402
from torch import nn  # noqa: E402

import halfulp as hu  # noqa: E402

UPDATES = ("nearest", "stochastic", "kahan", "kahan-stochastic", "split", "split8", "feedback", "master", "components")
STATES = ("bfloat16x2", "float32", "8bit")
OPTIMIZERS = ("SGD", "Adam", "AdamW", "Lion")


def model() -> nn.Module:
    """Two layers and a norm."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 4))


def trained(net: nn.Module, step, dtype: torch.dtype = torch.float32) -> None:
    """One step, which must change every parameter, each to finite values."""
    x = torch.linspace(-1, 1, 32, dtype=torch.float32).reshape(4, 8).to(dtype)
    before = [p.detach().clone() for p in net.parameters()]
    step(net(x).float().square().mean())
    for old, new in zip(before, net.parameters()):
        new = new.detach()
        old, new = (y.decode() if hasattr(y, "decode") else y for y in (old, new))
        assert new.isfinite().all(), "a parameter is not finite"
        assert not torch.equal(old, new), "a parameter did not move"


def stepped(optimizer) -> object:
    """A function of the loss that goes back and steps."""

    def step(loss: torch.Tensor) -> None:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def optimizers() -> None:
    """Every weight update, every kind of state and every optimizer, in bfloat16."""
    for name, update, state in (
        *(("AdamW", update, "bfloat16") for update in UPDATES),
        *(("AdamW", "stochastic", state) for state in STATES),
        *((name, "kahan", None) for name in OPTIMIZERS),
    ):
        net = model()
        options = {} if state is None else {"state_dtype": state}
        kind = getattr(hu.optim, name)
        made = kind(net.parameters(), lr=0.5, weight_update=update, param_dtype=torch.bfloat16, **options)
        try:
            trained(net, stepped(made), torch.bfloat16)
        except Exception as error:
            raise AssertionError(f"{name}, {update}, {state}: {error}") from error


def ema_and_wrap() -> None:
    """An average of weights, and a torch optimizer wrapped."""
    net = model().to(torch.bfloat16)
    made = hu.optim.wrap(torch.optim.AdamW, net.parameters(), lr=0.5, weight_update="kahan")
    trained(net, stepped(made), torch.bfloat16)
    ema = hu.optim.EMA(net, decay=0.9)
    ema.update()


def mctensors() -> None:
    """Arithmetic, a file, and a model of two components."""
    x = hu.MCTensor.encode("0.1", components=2, dtype=torch.float64)
    assert (x + x).to_strings().startswith("0.2000000000000000000000")
    a = hu.MCTensor.encode(torch.eye(3, dtype=torch.float64) * 4, components=2, dtype=torch.float64)
    assert torch.linalg.cholesky(a).decode().diagonal().tolist() == [2.0, 2.0, 2.0]
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "x.pt")
        torch.save(x, path)
        assert torch.equal(torch.load(path, weights_only=True).decode(), x.decode())
    net = hu.multicomponent(model(), components=2, dtype=torch.float32)
    trained(net, stepped(torch.optim.AdamW(net.parameters(), lr=0.1)))


def scaled_tensors() -> None:
    """Arithmetic, a file, a model with scaled payloads, and one compiled."""
    x = hu.ScaledTensor.encode(torch.tensor([1.0, 3.0e6], dtype=torch.float32), dtype=torch.float16)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "x.pt")
        torch.save(x, path)
        assert torch.equal(torch.load(path, weights_only=True).decode(), x.decode())
    for matmul in (None, "fp8"):
        net = hu.scalify(model(), dtype=torch.float16, matmul=matmul)
        trained(net, stepped(hu.optim.AdamW(net.parameters(), lr=0.1, weight_update="stochastic")))


def gradient_exponents() -> None:
    """AdaptiveGradScaler, every gradient in float16."""
    net = model()
    scaler = hu.AdaptiveGradScaler(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    x = torch.linspace(-1, 1, 32, dtype=torch.float32).reshape(4, 8)

    before = [p.detach().clone() for p in net.parameters()]
    for _ in range(3):
        optimizer.zero_grad()
        scaler.scale(net(x).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert not any(torch.equal(old, new) for old, new in zip(before, net.parameters()))


def emulation() -> None:
    """A model as if on hardware of a format."""
    net = model()
    hu.emulate(net, "e8m3")
    trained(net, stepped(torch.optim.SGD(net.parameters(), lr=1.0)))


def quantized() -> None:
    """Every format and rounding; also inside torch.compile."""
    x = torch.linspace(-3, 3, 64, dtype=torch.float32)
    for name in hu.formats.names():
        y = hu.quantize(x.abs() + 0.5, name, hu.Stochastic(seed=0))
        assert y.isfinite().all()
    for name in hu.formats.block_names():
        hu.quantize(x, hu.formats.get_block(name))
    assert float(hu.exact_sum(torch.tensor([1e300, 1.0, -1e300], dtype=torch.float64))) == 1.0
    compiled = torch.compile(lambda x: hu.quantize(x * 2, "bf16") - x, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), (x * 2).bfloat16().float() - x)


def converted() -> None:
    """Every recipe of bfloat16 as convert applies it, and verify on scales."""
    for name in ("bf16-kahan", "bf16-split8", "bf16-mixed", "fp16-mc2"):
        net = model()
        hu.convert(net, name)
    x = torch.ones((2, 8), dtype=torch.float32)
    assert hu.verify(model(), x, "scaled-fp16", trials=1).passed


def compared() -> None:
    """A comparison of few steps, with its page, by the command line; and its help."""
    with tempfile.TemporaryDirectory() as folder:
        for arguments in (
            ("--help",),
            ("formats",),
            ("recipes", "--json"),
            ("compare", "--task", "digits", "--recipe", "fp32,bf16-kahan", "--steps", "3", "--seeds", "1"),
        ):
            command = [sys.executable, "-W", "error", "-m", "halfulp.cli", *arguments]
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
            assert done.returncode == 0, f"halfulp {' '.join(arguments)}: {done.stderr[-300:]}"
        assert os.path.getsize(os.path.join(folder, "halfulp-compare", "compare.html")) > 10_000


SYSTEMS = {
    "optimizers": optimizers,
    "EMA, wrap": ema_and_wrap,
    "MCTensor": mctensors,
    "scalify": scaled_tensors,
    "AdaptiveGradScaler": gradient_exponents,
    "emulate": emulation,
    "quantize": quantized,
    "convert, verify": converted,
    "compare": compared,
}


def main() -> None:
    """Run them all, and print what became of each."""
    torch.set_num_threads(1)
    results = {}
    for name, system in SYSTEMS.items():
        print(f"{name} ...", file=sys.stderr, flush=True)
        try:
            system()
            results[name] = "passed"
        except Exception as error:
            traceback.print_exc()
            results[name] = f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
    print(
        json.dumps(
            {
                "torch": torch.__version__,
                "python": platform.python_version(),
                "halfulp": os.path.dirname(hu.__file__),
                "lacking operators": hu.kernels.list_absent_operators(),
                "notes": [str(note) for note in hu.kernels.count_fallbacks()],
                "systems": results,
            }
        )
    )


if __name__ == "__main__":
    main()
