"""The rest of the family: HALP, multipoint quantization, published recipes, loss change allocation.

`python -m benchmarks.bench_family [--seeds 13]`
"""

import argparse
import copy
import math
import time

from ._results import Result, Table, save

TEXT = """Methods that the four systems' papers build on, each on the task that shows what it is for. HALP: least \
squares of 20 float64 features with condition number 10 and 1,000 rows, 15 epochs of 500 steps at lr .004. Multipoint: \
a small convolutional net of separable layers on digits, batch normalization folded in. Published recipes: a task \
planted for each ingredient (benchmarks/_published_recipes.py), the last loss over the first with it and without. Loss \
change allocation: an MLP on digits, its layers in bfloat16 by nearest rounding, or one of them."""
ROWS, WIDTH, CONDITION, EPOCHS, STEPS, RATE = 1000, 20, 10.0, 15, 500, 0.004


def least_squares(seed):
    """Features of the condition number, and noisy targets."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    left, _, right = torch.linalg.svd(torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64), False)
    spread = torch.linspace(CONDITION**0.5, 1, WIDTH, dtype=torch.float64) * ROWS**0.5
    x = left * spread @ right
    y = x @ torch.randn(WIDTH, generator=generator, dtype=torch.float64)
    return x, y + 0.5 * torch.randn(ROWS, generator=generator, dtype=torch.float64)


def gap(seed, **options):
    """The loss above the least one after 15 epochs."""
    import torch

    import halfulp as hu

    x, y = least_squares(seed)
    best = torch.linalg.lstsq(x, y[:, None]).solution[:, 0]
    w = torch.nn.Parameter(torch.zeros(WIDTH, dtype=torch.float64))
    opt = hu.optim.HALP([w], lr=RATE, seed=seed, **options)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(EPOCHS):
        opt.center(lambda: (0.5 * (x @ w - y).square().mean()).backward())
        for i in torch.randint(ROWS, (STEPS,), generator=generator).tolist():
            opt.step(lambda i=i: (0.5 * (x[i] @ w - y[i]).square()).backward())
    return float(0.5 * (x @ (w.detach() - best)).square().mean())


def halp(seeds) -> Table:
    """HALP beside float64 SVRG and a fixed grid."""
    table = Table(
        "HALP: gap after 15 epochs", {"seed": "", "SVRG, float64": ".1e", "HALP, 8 bits": ".1e", "ratio": ".1f"}
    )
    table.columns |= {"fixed grid, 8 bits": ".1e"}
    for seed in range(seeds):
        svrg, ours = gap(seed, bits=None), gap(seed, bits=8)
        fixed = gap(seed, bits=8, bit_centering=False) if seed < 3 else None
        row = {"seed": seed, "SVRG, float64": svrg, "HALP, 8 bits": ours, "ratio": ours / svrg}
        table.add(**row, **{"fixed grid, 8 bits": fixed}, bar="ratio at most 10", met=ours <= 10 * svrg)
        print(seed, f"{svrg:.1e} {ours:.1e} {ours / svrg:.1f}", flush=True)
    return table


def digits():
    """Images and labels of scikit-learn's digits, a third for testing."""
    import torch
    from sklearn.datasets import load_digits

    data = load_digits()
    x = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16
    y = torch.tensor(data.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, test = order[:1200], order[1200:]
    return x[train], y[train], x[test], y[test]


def separable_net(seed):
    """A trained convolutional net of depthwise and pointwise layers, its batch normalization folded in."""
    import torch
    from torch import nn
    from torch.nn.utils.fusion import fuse_conv_bn_eval

    torch.manual_seed(seed)
    layers = [nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()]
    for width, out, stride in ((32, 64, 2), (64, 64, 1), (64, 128, 2)):
        layers += [nn.Conv2d(width, width, 3, stride, 1, groups=width), nn.BatchNorm2d(width), nn.ReLU()]
        layers += [nn.Conv2d(width, out, 1), nn.BatchNorm2d(out), nn.ReLU()]
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))
    x, y, _, _ = digits()
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    for _ in range(12):
        for rows in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x[rows]), y[rows]).backward()
            optimizer.step()
    net.eval()
    folded, k = [], 0
    while k < len(net):
        if isinstance(net[k], nn.Conv2d):
            folded.append(fuse_conv_bn_eval(net[k], net[k + 1]))
            k += 1
        else:
            folded.append(net[k])
        k += 1
    return nn.Sequential(*folded).requires_grad_(False)


def uniform(net, bits, per_channel):
    """Every weight on 2^bits equal levels from its tensor's, or its channel's, least to its largest number."""
    made = copy.deepcopy(net)
    for module in made.modules():
        if hasattr(module, "weight") and module.weight is not None:
            rows = module.weight.data.flatten(1) if per_channel else module.weight.data.reshape(1, -1)
            low, high = rows.amin(1, keepdim=True), rows.amax(1, keepdim=True)
            step = (high - low).clamp(min=1e-12) / (2**bits - 1)
            rows.copy_(((rows - low) / step).round() * step + low)
            module.weight.data.copy_(rows.view_as(module.weight))
    return made


def multipoint(seeds) -> Table:
    """Accuracy by bits beside min-max and per-channel quantization."""
    import halfulp as hu

    columns = {"bits": "", "seed": "", "float32": ".2f", "min-max": ".2f", "per channel": ".2f", "1 point": ".2f"}
    columns |= {"multipoint": ".2f", "bytes": ".3f"}
    table = Table("Multipoint: accuracy in % after quantization", columns)
    x, _, held, labels = digits()

    def accuracy(net):
        return 100 * float((net(held).argmax(1) == labels).float().mean())

    for seed in range(seeds):
        net = separable_net(seed)
        for bits in (4, 3, 2):
            ours, single = copy.deepcopy(net), copy.deepcopy(net)
            made = hu.multipoint(ours, bits, [x[:256]], budget=1.1)
            hu.multipoint(single, bits, [x[:256]], budget=1.0)
            row = {"bits": bits, "seed": seed, "float32": accuracy(net)}
            row |= {"min-max": accuracy(uniform(net, bits, False)), "per channel": accuracy(uniform(net, bits, True))}
            row |= {"1 point": accuracy(single), "multipoint": accuracy(ours), "bytes": made.bytes / made.single_bytes}
            bar = {"bar": "4 bits: within 1 point of float32 at 1.1 times the bytes"} if bits == 4 else {}
            met = row["multipoint"] >= row["float32"] - 1 and row["bytes"] <= 1.1
            table.add(**row, **bar, met=met if bits == 4 else None)
            print(table.rows[-1], flush=True)
    return table


def published(seeds) -> Table:
    """Each ingredient of two published recipes on the task that is planted for it."""
    from ._published_recipes import PLANTS

    columns = {"recipe": "", "ingredient": "", "seed": "", "with it": ".3g", "without": ".3g"}
    table = Table("Published recipes: last loss over first", columns)
    for plant in PLANTS:
        for seed in range(seeds):
            ours, without = plant.losses(seed)
            row = {"recipe": plant.recipe, "ingredient": plant.ingredient, "seed": seed, "with it": ours}
            row |= {
                "without": without if math.isfinite(without) else str(without),
                "bar": "below .4 with it, above .9 without",
            }
            table.add(**row, met=ours < 0.4 and not without < 0.9)
            print(row, flush=True)
    return table


def allocation(seeds) -> Table:
    """Which layer's rounding costs how much, where all layers or one of them is rounded to nearest."""
    import torch
    from torch import nn

    import halfulp as hu

    columns = {"narrow": "", "seed": "", "change": "+.3f", "allocated": "+.3f", "error in %": ".4f"}
    columns |= {f"rounding of {layer}": "+.4f" for layer in (0, 2, 4)}
    table = Table("Loss change allocation: digits MLP, 60 steps of SGD, lr .01", columns)
    x, y, _, _ = digits()
    x = x.flatten(1)

    def loss(model):
        return nn.functional.cross_entropy(model(x), y)

    for narrow in ("0, 2, 4", "0", "2", "4"):
        for seed in range(seeds):
            torch.manual_seed(seed)
            model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
            for layer in map(int, narrow.split(", ")):
                model[layer].weight.data = model[layer].weight.data.bfloat16().float()
            groups = [
                {"params": [one.weight, one.bias], "format": "bf16", "weight_update": "nearest"}
                if str(k) in narrow.split(", ")
                else {"params": [one.weight, one.bias]}
                for k, one in enumerate(model)
                if k % 2 == 0
            ]
            optimizer = hu.optim.SGD(groups, lr=0.01, report_interval=0)
            with hu.observation.allocate_loss(model, optimizer, loss) as costs:
                for rows in torch.randint(len(x), (60, 64)):
                    optimizer.zero_grad()
                    nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
                    optimizer.step()
            cost = {k: sum(costs.shares[f"{k}.{name}"].rounding for name in ("weight", "bias")) for k in (0, 2, 4)}
            row = {"narrow": narrow, "seed": seed, "change": costs.change, "allocated": costs.allocated}
            row |= {"error in %": 100 * costs.error, **{f"rounding of {k}": value for k, value in cost.items()}}
            named = narrow == "0, 2, 4" or str(max(cost, key=cost.get)) == narrow
            table.add(**row, bar="error below .1%, and the narrow layer is named", met=costs.error < 1e-3 and named)
            print(row, flush=True)
    return table


def main() -> None:
    """Runs all, or the parts that are named."""
    parts = {"halp": halp, "multipoint": multipoint, "published": published, "allocation": allocation}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[*parts, []])
    parser.add_argument("--seeds", type=int, default=13)
    given = parser.parse_args()
    began = time.process_time()
    result = Result("family", "The rest of the family", TEXT, "python -m benchmarks.bench_family")
    for name in given.parts or parts:
        result.tables.append(parts[name](given.seeds if name == "halp" else min(3, given.seeds)))
    print(f"{time.process_time() - began:.0f} s of CPU time")
    if not given.parts:
        save(result)


if __name__ == "__main__":
    main()
