"""Trainers with the two lines that halfulp asks for: `python -m benchmarks.bench_trainers` where they are installed."""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import halfulp as hu
from halfulp.kernels import same_bits

from ._harness import ROOT
from ._results import Result, Table, save

SEED, STEPS, HALF, BATCH, LR = 60413, 8, 4, 4, 1e-2
TEXT = """One small model (two linear layers and a norm between) in each trainer, on a CPU. The lines are those that a \
user adds to a float32 script, imports included, counted from the text that is run. Bits are those of the plain loop \
over the batches that the trainer has drawn; a run is resumed halfway by the trainer's own checkpoint, in a new model, \
under five weight updates and states, and under the scaler, and must end with the bits of the uninterrupted run. \
Observed: `with hu.observe(...)` sees each step, or \
`halfulp observe` does (0 lines) where the optimizer is made inside. Precision is that of weights and states when the \
training has ended, layer by layer."""
UPDATES: dict[str, dict[str, Any]] = {
    "stochastic": {"weight_update": "stochastic"},
    "kahan": {"weight_update": "kahan"},
    "split8": {"weight_update": "split8"},
    "split8, 8-bit states": {"weight_update": "split8", "state_dtype": "8bit"},
    "stochastic, 8-bit states": {"weight_update": "stochastic", "state_dtype": "8bit"},
}
FP16 = {"format": "fp16", "policy": "dynamic"}


class Net(nn.Module):
    """A model that takes floats of any kind and returns its loss, as transformers' Trainer wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)
        self.seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        """The loss."""
        if torch.is_grad_enabled():
            self.seen.append((x.detach().clone(), y.detach().clone()))
        hidden = self.first(x.to(self.first.weight.dtype))
        hidden = self.norm(hidden.to(self.norm.weight.dtype)).to(hidden.dtype)
        return {"loss": (self.last(hidden.tanh()).float() - y).square().mean()}


def net() -> Net:
    """The start of every run."""
    torch.manual_seed(SEED)
    return Net()


def rows() -> list[dict[str, torch.Tensor]]:
    """The data: as many rows as all steps take."""
    drawn = torch.randn(STEPS * BATCH, 12, generator=torch.Generator().manual_seed(SEED))
    return [{"x": row[:8], "y": row[8:]} for row in drawn]


def loader() -> Any:
    """The data in order."""
    return torch.utils.data.DataLoader(rows(), batch_size=BATCH)  # type: ignore[arg-type]


def train_by_hand(backward: Callable, model: nn.Module, optimizer: torch.optim.Optimizer, first: int, end: int) -> None:
    """A user's own loop over some of the batches, with a trainer's backward."""
    for step, batch in enumerate(loader()):
        if first <= step < end:
            backward(model(**batch)["loss"])
            optimizer.step()
            optimizer.zero_grad()


def lines_of(text: str) -> int:
    """How many lines a user writes."""
    return sum(bool(line.strip()) for line in text.splitlines())


def add(text: str, **scope: Any) -> dict[str, Any]:
    """Run a user's lines; return the names that they see and make."""
    exec(text, scope)
    return scope


class Trainer:
    """One trainer: the lines of each case, and how it trains, saves and resumes.

    Attributes:
        bf16, fp16, observe: a user's lines; None where the trainer has no such thing.
        needs: the package, and others that it wants here.
    """

    needs: tuple[str, ...] = ()
    bf16, fp16, observe = "", None, "with hu.observe(model, optimizer, interval=1) as seen:\n    train()"

    def train(self, case: str, options: dict, folder: Path, last: int = STEPS, resume: bool = False) -> tuple[Net, Any]:
        """Train in a case up to a step and save there; or go on from what is saved."""
        raise NotImplementedError

    def version(self) -> str:
        """Its version."""
        return importlib.metadata.version(self.needs[0])


class Transformers(Trainer):
    """transformers' Trainer."""

    needs = ("transformers",)
    bf16 = (
        "from halfulp.integrations.transformers import optimizer\n"
        "more['optimizer_cls_and_kwargs'] = optimizer(args, 'AdamW', param_dtype='bf16', **options)"
    )
    fp16 = (
        "from halfulp.integrations.accelerate import use_scaler\n"
        "scaler = use_scaler(trainer.accelerator, model, **options)"
    )
    observe = ""

    def train(self, case, options, folder, last=STEPS, resume=False):
        """As said of every trainer."""
        import transformers

        class Stop(transformers.TrainerCallback):
            def on_step_end(self, args, state, control, **more):
                control.should_training_stop |= state.global_step >= last

        args = transformers.TrainingArguments(
            output_dir=str(folder),
            use_cpu=True,
            max_steps=STEPS,
            save_steps=HALF,
            per_device_train_batch_size=BATCH,
            learning_rate=LR,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            report_to=[],
            disable_tqdm=True,
            remove_unused_columns=False,
        )
        model, more = net(), {}
        if case == "bf16":
            add(self.bf16, args=args, options=options, more=more)
        else:
            sgd = torch.optim.SGD(model.parameters(), lr=LR)
            more["optimizers"] = sgd, torch.optim.lr_scheduler.ConstantLR(sgd, 1.0)
        trainer = transformers.Trainer(model, args, train_dataset=rows(), callbacks=[Stop()], **more)
        if case == "fp16":
            add(self.fp16, trainer=trainer, model=model, options=options)
        start = str(folder / f"checkpoint-{HALF}") if resume else None
        trainer.train(resume_from_checkpoint=start)
        return model, trainer.optimizer


class Accelerate(Trainer):
    """A loop of accelerate."""

    needs = ("accelerate",)
    bf16 = "optimizer = hu.AdamW(model.named_parameters(), lr=lr, param_dtype='bf16', **options)"
    fp16 = "from halfulp.integrations.accelerate import use_scaler\nscaler = use_scaler(accelerator, model, **options)"

    def train(self, case, options, folder, last=STEPS, resume=False):
        """As said of every trainer."""
        import accelerate

        accelerator, model = accelerate.Accelerator(cpu=True), net()
        if case == "fp16":
            add(self.fp16, accelerator=accelerator, model=model, options=options)
            optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        else:
            optimizer = add(self.bf16, hu=hu, model=model, lr=LR, options=options)["optimizer"]
        prepared, optimizer = accelerator.prepare(model, optimizer)
        if resume:
            accelerator.load_state(str(folder))

        def train():
            train_by_hand(accelerator.backward, prepared, optimizer, HALF if resume else 0, last)

        if case == "observe":
            return model, add(self.observe, hu=hu, model=prepared, optimizer=optimizer, train=train)["seen"]
        train()
        if last == HALF:
            accelerator.save_state(str(folder))
        return model, optimizer


class Fabric(Trainer):
    """A loop of Lightning's Fabric."""

    needs, bf16 = ("lightning",), Accelerate.bf16

    def train(self, case, options, folder, last=STEPS, resume=False):
        """As said of every trainer."""
        from lightning.fabric import Fabric as Their

        fabric, model = Their(accelerator="cpu", devices=1), net()
        optimizer = add(self.bf16, hu=hu, model=model, lr=LR, options=options)["optimizer"]
        prepared, optimizer = fabric.setup(model, optimizer)
        if resume:
            fabric.load(folder / "half.ckpt", {"model": prepared, "optimizer": optimizer})

        def train():
            train_by_hand(fabric.backward, prepared, optimizer, HALF if resume else 0, last)

        if case == "observe":
            return model, add(self.observe, hu=hu, model=prepared, optimizer=optimizer, train=train)["seen"]
        train()
        if last == HALF:
            fabric.save(folder / "half.ckpt", {"model": prepared, "optimizer": optimizer})
        return model, optimizer


class Lightning(Trainer):
    """Lightning's Trainer."""

    needs = ("lightning",)
    bf16 = (
        "from halfulp.integrations.lightning import Recipe\n"
        "plugins = [Recipe('bf16-' + ('split8' if 'split8' in options['weight_update'] else options['weight_update']))]"
    )
    fp16 = "from halfulp.integrations.lightning import AdaptiveMixed\nplugins = [AdaptiveMixed('cpu', **options)]"
    observe = ""

    def train(self, case, options, folder, last=STEPS, resume=False):
        """As said of every trainer."""
        import lightning.pytorch as pl

        class Module(pl.LightningModule):
            def __init__(self):
                super().__init__()
                self.net = net()

            def forward(self, x, y):
                return self.net(x, y)["loss"]

            def training_step(self, batch, index):
                return self(**batch)

            def configure_optimizers(self):
                if case == "fp16":
                    return torch.optim.SGD(self.parameters(), lr=LR)
                return hu.AdamW(self.named_parameters(), lr=LR, **options)

        module = Module()
        plugins = add(self.fp16 if case == "fp16" else self.bf16, options=options or {"weight_update": "kahan"})
        quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
        # By epochs: in the middle of one, Lightning begins a loader without a state from its first batch.
        given = {"max_epochs": last // HALF, "default_root_dir": folder, "plugins": plugins["plugins"], **quiet}
        trainer = pl.Trainer(accelerator="cpu", devices=1, **given)
        path = str(folder / "half.ckpt")
        data = torch.utils.data.DataLoader(rows()[: HALF * BATCH], batch_size=BATCH)

        trainer.fit(module, data, ckpt_path=path if resume else None)
        if last == HALF:
            trainer.save_checkpoint(path)
        return module.net, trainer.optimizers[0]


class Timm(Trainer):
    """timm's factory and its NativeScaler, in a loop like its train.py."""

    needs = ("timm", "torchvision")
    bf16 = (
        "import halfulp.integrations.timm; halfulp.integrations.timm.register()\n"
        "optimizer = create_optimizer_v2(model, 'huadamw', lr=lr, param_dtype='bf16', **options)"
    )
    fp16 = "scaler._scaler = hu.AdaptiveGradScaler(model, **options)"

    def train(self, case, options, folder, last=STEPS, resume=False):
        """As said of every trainer."""
        from timm.optim import create_optimizer_v2
        from timm.utils import NativeScaler

        model, scaler = net(), None
        if case == "fp16":
            scaler = NativeScaler(device="cpu")
            add(self.fp16, hu=hu, scaler=scaler, model=model, options=options)
            optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        else:
            scope = {"model": model, "lr": LR, "options": options, "create_optimizer_v2": create_optimizer_v2}
            optimizer = add(self.bf16, **scope)["optimizer"]
        return _in_a_loop(self, case, model, optimizer, scaler, folder, last, resume)


class Diffusers(Trainer):
    """A script of diffusers with its averages; what is compared are these."""

    needs = ("diffusers",)
    bf16 = (
        "from halfulp.integrations.diffusers import EMAModel\n"
        "optimizer = hu.AdamW(model.named_parameters(), lr=lr, param_dtype='bf16', **options)"
    )

    def train(self, case, options, folder, last=STEPS, resume=False):
        """As said of every trainer."""
        model = net()
        scope = add(self.bf16, hu=hu, model=model, lr=LR, options=options)
        average = scope["EMAModel"](model, decay=0.9, optimizer=scope["optimizer"])
        result = _in_a_loop(self, case, model, scope["optimizer"], None, folder, last, resume, average)
        if case != "observe":
            average.copy_to(model.parameters())
        return result


class Torchtitan(Trainer):
    """torchtitan's container of optimizers, and its flat states."""

    needs = ("torchtitan", "spmd_types")
    bf16 = (
        "from halfulp.integrations.torchtitan import register; register()\n"
        "group = ParamGroupConfig(pattern='.*', optimizer_name='halfulp.AdamW', optimizer_kwargs={'lr': lr, **options})"
    )

    def train(self, case, options, folder, last=STEPS, resume=False):
        """As said of every trainer."""
        from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig

        model = net()
        narrow = {"param_dtype": "bf16", **options}
        scope = add(self.bf16, ParamGroupConfig=ParamGroupConfig, lr=LR, options=narrow)
        config = OptimizersContainer.Config(param_groups=[scope["group"]])
        container = OptimizersContainer(config, model_parts=[model])
        result = _in_a_loop(self, case, model, container, None, folder, last, resume)
        return result if case == "observe" else (model, container.optimizers[0])


def _in_a_loop(trainer, case, model, optimizer, scaler, folder, last, resume, average=None) -> tuple[Net, Any]:
    """The loop that scripts of timm, diffusers and torchtitan write themselves."""
    path = folder / "half.pt"
    parts = {"model": model, "optimizer": optimizer} | ({"average": average} if average else {})
    parts |= {"scaler": scaler} if scaler else {}
    if resume:
        held = torch.load(path, weights_only=False)
        for name, part in parts.items():
            part.load_state_dict(held[name])

    def train():
        for step, batch in enumerate(loader()):
            if (HALF if resume else 0) <= step < last:
                loss = model(**batch)["loss"]
                if scaler is None:
                    loss.backward()
                    optimizer.step()
                else:
                    scaler(loss, optimizer)
                optimizer.zero_grad()
                if average is not None:
                    average.step(model.parameters())

    if case == "observe":
        inner = getattr(optimizer, "optimizers", [optimizer])[0]
        return model, add(trainer.observe, hu=hu, model=model, optimizer=inner, train=train)["seen"]
    train()
    if last == HALF:
        torch.save({name: part.state_dict() for name, part in parts.items()}, path)
    return model, optimizer


def plain(case: str, options: dict, seen: list, kind: type[Trainer]) -> Net:
    """The plain loop over the batches that a trainer has drawn."""
    model, scaler, average = net(), None, None
    if kind is Lightning and case == "bf16":
        name = options["weight_update"]
        hu.convert(model, f"bf16-{'split8' if 'split8' in name else name}")
        optimizer = hu.AdamW([(f"net.{n}", p) for n, p in model.named_parameters()], lr=LR, **options)
    elif case == "bf16":
        # timm gives no names, and no weight decay unless it is asked for.
        given = (model.parameters(), 0.0) if kind is Timm else (model.named_parameters(), 0.01)
        optimizer = hu.AdamW(given[0], lr=LR, weight_decay=given[1], param_dtype="bf16", **options)
    else:
        scaler = hu.AdaptiveGradScaler(model, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for group in optimizer.param_groups if kind is Transformers else ():
        group["weight_decay"] = 0.0
    if kind is Diffusers:
        average = hu.integrations.diffusers.EMAModel(model, decay=0.9, optimizer=optimizer)
    for x, y in seen:
        with torch.autocast("cpu", torch.float16, enabled=kind is Lightning and case == "fp16"):
            loss = model(x, y)["loss"]
        (loss if scaler is None else scaler.scale(loss)).backward()
        optimizer.step() if scaler is None else scaler.step(optimizer)
        if scaler is not None:
            scaler.update()
        optimizer.zero_grad()
        if average is not None:
            average.step(model.parameters())
    if average is not None:
        average.copy_to(model.parameters())
    return model


def equal(one: nn.Module, other: nn.Module) -> bool:
    """Whether two models have the same bits."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(same_bits(a.detach(), b.detach()) for a, b in pairs)


def precision(model: Net, optimizer: Any) -> str:
    """Weights and states of each layer."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    found = []
    for name, parameter in model.named_parameters():
        if name.endswith("weight"):
            held = optimizer.state.get(parameter, {})
            states = ", ".join(
                f"{key} {str(value.dtype).removeprefix('torch.')}"
                for key, value in held.items()
                if isinstance(value, torch.Tensor) and value.numel() > 1
            )
            dtype = str(parameter.dtype).removeprefix("torch.")
            found.append(f"{name.removesuffix('.weight')} {dtype}" + (f" ({states})" if states else ""))
    return "; ".join(found)


TRAINERS: dict[str, type[Trainer]] = {
    "transformers": Transformers,
    "accelerate": Accelerate,
    "Lightning": Lightning,
    "Fabric": Fabric,
    "timm": Timm,
    "diffusers": Diffusers,
    "torchtitan": Torchtitan,
}


def tried(check: Callable[[], Any]) -> Any:
    """What a check gives, or the error in its place."""
    try:
        return check()
    except Exception as error:  # a trainer that breaks has a row all the same
        return f"{type(error).__name__}: {str(error)[:160]}"


def by_command(kind: type[Trainer], folder: Path) -> bool:
    """Whether `halfulp observe` sees each step of a script in this trainer."""
    (folder / "script.py").write_text(
        f"import pathlib\nfrom benchmarks.bench_trainers import {kind.__name__}, UPDATES\n"
        f"{kind.__name__}().train('bf16', UPDATES['kahan'], pathlib.Path('out'))\n"
    )
    command = [sys.executable, "-W", "ignore", "-m", "halfulp.cli", "observe", "--interval", "1", "script.py"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    written = folder / "halfulp-observe" / "observe.json"
    if done.returncode or not written.exists():
        raise RuntimeError(done.stderr[-160:])
    content = json.loads(written.read_text())
    return content["steps"] == STEPS and all(one["code"] != "never-stepped" for one in content["findings"])


def row_of(name: str, kind: type[Trainer], folder: Path) -> dict[str, Any]:
    """Everything that the tables want of a trainer."""
    trainer, ended = kind(), {}

    def bits(case: str, options: dict) -> bool:
        model, optimizer = trainer.train(case, options, folder / case)
        ended[case] = precision(model, optimizer)
        return equal(model, plain(case, options, model.seen, kind))

    def resumed(case: str, options: dict, place: Path) -> bool:
        whole, _ = trainer.train(case, options, place / "whole")
        trainer.train(case, options, place / "half", last=HALF)
        again, _ = trainer.train(case, options, place / "half", resume=True)
        return equal(whole, again)

    def observed() -> Any:
        if not kind.observe:
            return by_command(kind, folder / "observe")
        _, seen = trainer.train("observe", UPDATES["kahan"], folder / "observe")
        return len(seen) == STEPS and all(one.code != "never-stepped" for one in seen.findings)

    ways = [("bf16", options) for options in UPDATES.values()] + ([("fp16", FP16)] if kind.fp16 else [])
    for number in range(len(ways)):
        for part in ("whole", "half"):
            (folder / str(number) / part).mkdir(parents=True)
    for case in ("bf16", "fp16", "observe"):
        (folder / case).mkdir()
    same = tried(lambda: bits("bf16", UPDATES["split8"]))
    scaled = tried(lambda: bits("fp16", FP16)) if kind.fp16 else None
    again = [tried(lambda k=k, way=way: resumed(*way, folder / str(k))) for k, way in enumerate(ways)]
    seen = tried(observed)
    wrong = [one for one in (same, scaled, seen, *again) if isinstance(one, str)]
    observe_lines = max(0, lines_of(kind.observe) - 1)  # the loop is there anyway
    return {
        "trainer": f"{name} {trainer.version()}",
        "bf16: lines": lines_of(kind.bf16),
        "bits of the plain loop": same is True,
        "fp16 with the scaler: lines": lines_of(kind.fp16) if kind.fp16 else "–",
        "its bits": "–" if scaled is None else scaled is True,
        "resumed": f"{sum(one is True for one in again)} of {len(again)}",
        "observe: lines": observe_lines,
        "each step seen": seen is True,
        "error": "; ".join(wrong),
        "weights and states": ended.get("bf16", ""),
        "torch": torch.__version__,
        "met": same is True
        and scaled in (None, True)
        and all(one is True for one in again)
        and seen is True
        and max(lines_of(kind.bf16), lines_of(kind.fp16 or ""), observe_lines) <= 2,
    }


def main() -> None:
    """Run, print and keep; the rows of trainers that are not named or not installed stay as they are."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trainers", nargs="*", help=f"which of {', '.join(TRAINERS)}; default: all")
    given = parser.parse_args()
    if unknown := set(given.trainers) - set(TRAINERS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; choose from {', '.join(TRAINERS)}")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # advice of trainers
    result = Result("trainers", "Trainers", TEXT, "python -m benchmarks.bench_trainers")
    columns = ("trainer", "bf16: lines", "bits of the plain loop", "fp16 with the scaler: lines", "its bits", "resumed")
    columns += ("observe: lines", "each step seen", "weights and states", "torch", "error")
    table = Table("Trainers: lines, bits, resume", dict.fromkeys(columns, ""))
    kept = {trainer.split()[0]: row for (trainer,), row in result.earlier_rows("trainer").items()}
    for name, kind in TRAINERS.items():
        left_out = given.trainers and name not in given.trainers
        if left_out or any(importlib.util.find_spec(package) is None for package in kind.needs):
            table.add(**kept.get(name, {"trainer": f"{name} is not installed", "met": None}))
            continue
        with tempfile.TemporaryDirectory() as folder:
            table.add(**row_of(name, kind, Path(folder)))
    result.tables.append(table)
    save(result)


if __name__ == "__main__":
    main()
