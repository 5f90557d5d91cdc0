"""First calls of every system in fresh processes under torch's global defaults: `python -m benchmarks.bench_defaults`.

Every call names dtype and device of its tensors, so that the results may not depend on what torch would choose. Each
line is compared, bit for bit, with a process that has torch's own defaults.
"""

import argparse
import hashlib
import json
import subprocess
import sys

DEFAULTS = ("float32 cpu", "bfloat16 cpu", "float16 cpu", "float64 cpu", "float32 meta", "float16 meta")
LATE = "after a first step"
FEW = ("AdamW, 8-bit states", "wrap", "scalify", "EMA")


def digest(*tensors) -> str:
    """The dtypes, shapes and bits of some tensors."""
    import torch

    found = hashlib.sha256()
    for x in tensors:
        x = x.detach()
        x = x.decode(torch.float64) if hasattr(x, "decode") else x
        found.update(f"{x.dtype} {tuple(x.shape)}".encode())
        found.update(bytes(x.contiguous().reshape(-1).view(torch.uint8).tolist()))
    return found.hexdigest()[:16]


def numbers(*shape: int, dtype=None, seed: int = 1):
    """Normal numbers."""
    import torch

    generator = torch.Generator("cpu").manual_seed(seed)
    kind = {"dtype": torch.float32, "device": "cpu", "generator": generator}
    return torch.randn(shape, **kind).to(dtype or torch.float32)


def model(dtype=None):
    """Two layers with parameters that are given."""
    import torch

    layers = [torch.nn.Linear(8, 32, dtype=torch.float32, device="cpu") for _ in range(2)]
    for number, layer in enumerate(layers):
        layer.weight = torch.nn.Parameter(numbers(32, 8, seed=2 + number) if number == 0 else numbers(4, 32, seed=9))
        layer.bias = torch.nn.Parameter(numbers(32 if number == 0 else 4, seed=5))
    return torch.nn.Sequential(layers[0], torch.nn.Tanh(), layers[1]).to(dtype or torch.float32)


def trained(net, optimizer, x, steps: int = 2) -> list:
    """The parameters after some steps."""
    for _ in range(steps):
        optimizer.zero_grad()
        (net(x).float() ** 2).sum().backward()
        optimizer.step()
    return list(net.parameters())


def steps(kind: str, **options) -> str:
    """Two steps of an optimizer on the model in a dtype."""
    import torch

    import halfulp as hu

    dtype = options.pop("dtype", torch.bfloat16)
    net = model(dtype)
    optimizer = getattr(hu.optim, kind)(net.parameters(), lr=1e-3, report_interval=1, **options)
    parameters = trained(net, optimizer, numbers(5, 8, dtype=net[0].weight.dtype))
    return digest(*parameters, *optimizer.float32_state_dict(net).values())


def averaged(late=lambda: None) -> str:
    """EMA of a model that trains in 16 bits."""
    import torch

    import halfulp as hu

    net = model(torch.bfloat16)
    optimizer = hu.optim.AdamW(net.parameters(), lr=1e-2)
    ema = hu.optim.EMA(net, 0.9, optimizer=optimizer)
    trained(net, optimizer, numbers(5, 8, dtype=torch.bfloat16))
    late()
    for _ in range(3):
        trained(net, optimizer, numbers(5, 8, dtype=torch.bfloat16))
        ema.update()
    with ema.apply():
        shown = [p.detach().clone() for p in net.parameters()]
    return digest(*shown, *ema.float32_state_dict().values(), *net.parameters())


def wrapped(late=lambda: None) -> str:
    """torch's RMSprop on 16-bit parameters."""
    import torch

    import halfulp as hu

    net = model(torch.bfloat16)
    optimizer = hu.optim.wrap(torch.optim.RMSprop, net.parameters(), lr=1e-3, foreach=False)
    trained(net, optimizer, numbers(5, 8, dtype=torch.bfloat16))
    late()
    parameters = trained(net, optimizer, numbers(5, 8, dtype=torch.bfloat16))
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    return digest(*parameters, *optimizer.float32_state_dict(net).values())


def scalified() -> str:
    """A scalified model's steps."""
    import torch

    import halfulp as hu

    net = hu.scalify(model(), dtype=torch.float16)
    optimizer = hu.optim.AdamW(net.parameters(), lr=1e-3)
    for _ in range(2):
        optimizer.zero_grad()
        (net(numbers(5, 8)) ** 2).sum().backward()
        optimizer.step()
    return digest(*net.parameters())


def multiplied() -> str:
    """A multi-component model's output, gradients and torch's AdamW."""
    import torch

    import halfulp as hu

    net = hu.multicomponent(model(), 2, torch.bfloat16)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    parameters = trained(net, optimizer, numbers(5, 8, dtype=torch.bfloat16))
    return digest(*parameters)


def multiplied_steps() -> str:
    """hu.optim's AdamW on a multi-component model."""
    import torch

    import halfulp as hu

    net = hu.multicomponent(model(), 2, torch.bfloat16)
    optimizer = hu.optim.AdamW(net.parameters(), lr=1e-3)
    return digest(*trained(net, optimizer, numbers(5, 8, dtype=torch.bfloat16)))


def expansions() -> str:
    """Arithmetic of MCTensors."""
    import torch

    import halfulp as hu

    found = []
    for dtype, components in ((torch.float32, 2), (torch.bfloat16, 3), (torch.float16, 2), (torch.float64, 2)):
        a, b = (hu.MCTensor.encode(numbers(6, 6, seed=s), components, dtype) for s in (1, 2))
        found += [a + b, a * b, a / b, a @ b, a.exp(), a.sum(), a.sum(0), (a * a).sqrt(), a.sort(1).values, a * 0.1]
        found += [torch.where(a > b, a, b), a.mean(1), a.tanh(), a.cumsum(0), torch.linalg.solve(a, b)]
    return digest(*found)


def rounded() -> str:
    """Every kind of rounding."""
    import torch

    import halfulp as hu

    x = numbers(4, 40)
    found = [hu.quantize(x, name) for name in ("e4m3fn", "e5m2", "bf16", "mxfp4", "nvfp4")]
    found += [hu.quantize(x.double(), "e8m3", hu.Stochastic(seed=3)), hu.quantize(x.bfloat16(), "e4m3fn", hu.Up())]
    return digest(*found, hu.exact_sum(x, 1), hu.exact_dot(x, x), hu.exact_sum(x.to(torch.bfloat16)))


def emulated() -> str:
    """Gradients on hardware of a format."""
    from halfulp.emulation import region

    net = model()
    with region("e8m5"):
        loss = (net(numbers(5, 8)) ** 2).sum()
    loss.backward()
    return digest(*(p.grad for p in net.parameters()))


def scaled_gradients() -> str:
    """Gradient exponents, learned over two steps."""
    import torch

    import halfulp as hu

    net = model()
    scaler = hu.AdaptiveGradScaler(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3, foreach=False)
    for _ in range(2):
        optimizer.zero_grad()
        scaler.scale((net(numbers(5, 8)) ** 2).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    return digest(*net.parameters())


def hyperbolic() -> str:
    """A step in the half-space."""
    import torch

    import halfulp as hu

    points = torch.nn.Parameter(torch.cat([numbers(5, 1), numbers(5, 1).abs() + 1], 1).double())
    optimizer = hu.hyperbolic.RiemannianSGD([points], lr=1e-2)
    hu.hyperbolic.HalfSpace().distance(points[:1], points[1:]).sum().backward()
    optimizer.step()
    return digest(points)


def lines(late=lambda: None) -> dict:
    """Every line of the table: its name and what computes it."""
    import torch

    import halfulp as hu

    found = {
        f"AdamW, {name}": lambda name=name: steps("AdamW", weight_update=name)
        for name in ("nearest", "stochastic", "kahan", "kahan-stochastic", "split", "split8", "feedback", "master")
    }
    return found | {
        "AdamW, Components(3)": lambda: steps("AdamW", weight_update=hu.Components(3)),
        "AdamW, float16": lambda: steps("AdamW", dtype=torch.float16),
        "AdamW, param_dtype": lambda: steps("AdamW", dtype=torch.float32, param_dtype=torch.bfloat16),
        "AdamW, a format": lambda: steps("AdamW", dtype=torch.float32, format="e8m5"),
        "AdamW, 8-bit states": lambda: steps("AdamW", state_dtype="8bit"),
        "AdamW, bfloat16x2 states": lambda: steps("AdamW", state_dtype="bfloat16x2"),
        "SGD": lambda: steps("SGD", momentum=0.9),
        "Lion": lambda: steps("Lion"),
        "scalify": scalified,
        "multicomponent": multiplied,
        "multicomponent, hu.optim": multiplied_steps,
        "MCTensor": expansions,
        "quantize, exact sums": rounded,
        "emulate": emulated,
        "AdaptiveGradScaler": scaled_gradients,
        "hyperbolic": hyperbolic,
        "wrap": lambda: wrapped(late),
        "EMA": lambda: averaged(late),
    }


def run(default: str, late: bool = False, few: bool = False) -> dict[str, str]:
    """The digest of every line in this process; with `late` the defaults are set after wrap's and EMA's first step."""
    import torch

    dtype, device = default.split()

    def switch() -> None:
        torch.set_default_dtype(getattr(torch, dtype))
        torch.set_default_device(device)

    if late:
        return {f"{name}, {LATE}": lines(switch)[name]() for name in ("EMA", "wrap")}
    if default != DEFAULTS[0]:
        switch()
    found = {}
    for name, compute in lines().items():
        if few and name not in FEW:
            continue
        try:
            found[name] = compute()
        except Exception as error:  # a line of the table says so
            found[name] = f"{type(error).__name__}: {error}"[:300]
    return found


def process(default: str, late: bool = False, few: bool = False) -> dict[str, str]:
    """The same in a fresh process."""
    command = [sys.executable, "-W", "ignore", __file__, "--default", default, *["--late"] * late, *["--few"] * few]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"process": f"exit {done.returncode}: {done.stderr[-300:]}"}
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """All defaults against torch's own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--default", choices=DEFAULTS)
    parser.add_argument("--late", action="store_true")
    parser.add_argument("--few", action="store_true")
    given = parser.parse_args()
    if given.default:
        print(json.dumps(run(given.default, given.late, given.few)))
        return
    from benchmarks._results import Result, Table, save

    expected = process(DEFAULTS[0])
    expected |= process(DEFAULTS[0], late=True)
    failed = {name: line for name, line in expected.items() if ":" in line}
    if failed:
        raise RuntimeError(f"under torch's own defaults: {failed}")
    table = Table("Bits beside torch's own defaults", {"default": "", "same": "", "of": "", "other": ""})
    for default in DEFAULTS[1:]:
        found = process(default) | process(default, late=True)
        other = [
            f"{name}: {found.get(name, found.get('process'))}" for name in expected if found.get(name) != expected[name]
        ]
        table.add(default=default, same=len(expected) - len(other), of=len(expected), other="; ".join(other))
    result = Result("defaults", "Under torch's global defaults", __doc__, "python -m benchmarks.bench_defaults")
    result.tables.append(table)
    for row in table.rows:
        print(row)
    save(result)


if __name__ == "__main__":
    main()
