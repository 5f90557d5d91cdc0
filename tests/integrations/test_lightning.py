"""Precision plugins and the callback inside Lightning; skipped where it is missing."""

import gc
import weakref

import pytest
import torch
from torch import nn

import halfulp as hu
from halfulp.kernels import same_bits
from halfulp.optim._optimizer import unwrap_optimizer

lightning = pytest.importorskip("lightning.pytorch")
from halfulp.integrations.lightning import AdaptiveMixed, Precision, Recipe  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's advice on numbers of workers
QUIET = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)


class Module(lightning.LightningModule):
    def __init__(self, make):
        super().__init__()
        self.network = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 2))
        self.make = make

    def forward(self, inputs):
        return self.network(inputs)

    def training_step(self, batch, step):
        return self._loss(batch)

    def validation_step(self, batch, step):
        self.log("seen", self._loss(batch))

    def _loss(self, batch):
        inputs, targets = batch
        return (self(inputs).float() - targets).square().mean()

    def configure_optimizers(self):
        return self.make(self)


def _split8(module):
    return hu.recipes.optimizer(module, "AdamW", lr=1e-2, report_interval=1)


def _fitted(seed, folder, plugins, make=_split8, epochs=2, start=None, callback=None, others=(), **options):
    torch.manual_seed(seed)
    module = Module(make)
    data = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randn(64, 2))
    loader = torch.utils.data.DataLoader(data, batch_size=8)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=epochs,
        default_root_dir=folder,
        plugins=plugins,
        callbacks=[callback or Precision(), *others],
        enable_checkpointing=False,
        **QUIET,
        **options,
    )
    trainer.fit(module, loader, loader, ckpt_path=start)
    return module, trainer


def _equal(one, other):
    return all(same_bits(a.detach(), b.detach()) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_a_recipe_converts_the_users_module_and_resumes_to_the_bit(seed, tmp_path):
    whole, trainer = _fitted(seed, tmp_path, [Recipe("bf16-split8")])
    assert whole.network[0].weight.dtype == torch.bfloat16
    assert whole.network[1].weight.dtype == torch.float32
    _, early = _fitted(seed, tmp_path, [Recipe("bf16-split8")], epochs=1)
    early.save_checkpoint(tmp_path / "half.ckpt")
    resumed, _ = _fitted(seed, tmp_path, [Recipe("bf16-split8")], start=tmp_path / "half.ckpt")
    assert _equal(whole, resumed)
    assert "lost_updates" in trainer.callback_metrics


def test_a_checkpoint_of_another_precision_is_refused(seed, tmp_path):
    _, early = _fitted(seed, tmp_path, [Recipe("bf16-split8")], epochs=1)
    early.save_checkpoint(tmp_path / "half.ckpt")
    with pytest.raises(ValueError, match="saved with weight_update=Split8"):
        _fitted(seed, tmp_path, [Recipe("bf16-kahan")], start=tmp_path / "half.ckpt")
    held = torch.load(tmp_path / "half.ckpt", weights_only=False)
    held["precision_contract"]["tensors"]["network.1.weight"]["dtype"] = "bfloat16"
    torch.save(held, tmp_path / "half.ckpt")
    with pytest.raises(ValueError, match=r"does not hold: network\.1\.weight: dtype was bfloat16, is float32"):
        _fitted(seed, tmp_path, [Recipe("bf16-split8")], start=tmp_path / "half.ckpt")


def test_adaptive_scaling_trains_clips_and_resumes(seed, tmp_path):
    def sgd(module):
        return torch.optim.SGD(module.parameters(), lr=0.1)

    options = {"make": sgd, "gradient_clip_val": 0.5}
    whole, trainer = _fitted(seed, tmp_path, [AdaptiveMixed("cpu", policy="amax")], **options)
    _, early = _fitted(seed, tmp_path, [AdaptiveMixed("cpu", policy="amax")], epochs=1, **options)
    early.save_checkpoint(tmp_path / "half.ckpt")
    resumed, other = _fitted(
        seed, tmp_path, [AdaptiveMixed("cpu", policy="amax")], start=tmp_path / "half.ckpt", **options
    )
    assert _equal(whole, resumed)
    scalers = [one.precision_plugin.scaler for one in (trainer, other)]
    assert scalers[0].state_dict() == scalers[1].state_dict()
    assert len(scalers[0].sites().rows) > 1


@pytest.mark.parametrize("kind", [lambda: Recipe("bf16-split8"), lambda: AdaptiveMixed("cpu")], ids=["recipe", "mixed"])
def test_a_module_is_fitted_validated_and_fitted_again(kind, seed, tmp_path):
    make = _split8 if isinstance(kind(), Recipe) else lambda module: torch.optim.SGD(module.parameters(), lr=0.1)
    module, trainer = _fitted(seed, tmp_path, [kind()], make, epochs=1)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(8, 8), torch.randn(8, 2)))
    trainer.validate(module, data)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, data)
    if isinstance(trainer.precision_plugin, AdaptiveMixed):
        trainer.precision_plugin.scaler.detach()
    other = lightning.Trainer(
        accelerator="cpu",
        max_epochs=1,
        plugins=[kind()],
        enable_checkpointing=False,
        default_root_dir=tmp_path,
        **QUIET,
    )
    other.fit(module, data)
    other.validate(module, data)


def test_lightnings_own_bf16_loses_the_low_bits_that_the_recipe_keeps(seed, tmp_path):
    def still(module):
        return hu.AdamW(module.named_parameters(), lr=0.0, weight_decay=0.0, weight_update="split")

    torch.manual_seed(seed)
    start = Module(still).network[0].weight.detach().clone()
    for options, is_kept in (({"plugins": [Recipe("bf16-split8")]}, True), ({"precision": "bf16-true"}, False)):
        torch.manual_seed(seed)
        module = Module(still)
        data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(8, 8), torch.randn(8, 2)))
        given = {"accelerator": "cpu", "devices": 1, "max_steps": 1, "enable_checkpointing": False, **QUIET}
        trainer = lightning.Trainer(default_root_dir=tmp_path, **given, **options)
        trainer.fit(module, data)
        weights = unwrap_optimizer(trainer.optimizers[0]).float32_state_dict(module)["network.0.weight"]
        assert torch.equal(weights, start) == is_kept


def test_lightnings_own_averages_are_of_the_float32_start(seed, tmp_path):
    """Its callback copies the module before the recipe converts it, so that averages of narrow weights move."""
    callbacks = pytest.importorskip("lightning.pytorch.callbacks")
    if not hasattr(callbacks, "EMAWeightAveraging"):
        pytest.skip("this Lightning has no EMAWeightAveraging")
    averaging = callbacks.EMAWeightAveraging(decay=0.5)
    seen = []

    class Spy(Precision):
        def on_train_end(self, trainer, module):
            seen.extend({p.dtype for p in averaging._average_model.parameters()})

    _fitted(seed, tmp_path, [Recipe("bf16-split8")], epochs=1, callback=Spy(), others=[averaging])
    assert seen == [torch.float32]


@pytest.mark.parametrize("update", ["stochastic", "kahan"])
def test_fabrics_prefix_changes_no_bit(update, seed):
    fabric = pytest.importorskip("lightning.fabric").Fabric(accelerator="cpu", devices=1)
    x, found = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed)), []
    for is_prepared in (True, False):
        torch.manual_seed(seed)
        model = Module(None).network
        if is_prepared:
            model = fabric.setup_module(model)
        optimizer = hu.AdamW(model.named_parameters(), lr=1e-2, param_dtype="bf16", weight_update=update)
        for _ in range(3):
            model(x.bfloat16()).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(model)
    assert _equal(*found)


def test_a_fitted_module_is_freed(seed, tmp_path):
    module, trainer = _fitted(
        seed, tmp_path, [AdaptiveMixed("cpu")], lambda module: torch.optim.SGD(module.parameters(), lr=0.1), epochs=1
    )
    seen = [weakref.ref(module), weakref.ref(trainer.precision_plugin.scaler)]
    del module, trainer
    gc.collect()
    assert [one() for one in seen] == [None, None]


def test_the_command_line_takes_a_class_and_words(tmp_path):
    pytest.importorskip("jsonargparse")
    from lightning.pytorch.cli import LightningCLI

    class Narrow(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 2)

        def training_step(self, batch, at):
            return self.layer(batch[0].to(self.layer.weight.dtype)).float().square().mean()

    class Ones(lightning.LightningDataModule):
        def train_dataloader(self):
            return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(4, 4)))

    quiet = [f"--trainer.{name}=false" for name in (*QUIET, "enable_checkpointing")]
    given = ["--optimizer=halfulp.optim.AdamW", "--optimizer.lr=1e-2", "--optimizer.weight_update=kahan"]
    given += ["--optimizer.param_dtype=bf16", "--trainer.accelerator=cpu", f"--trainer.default_root_dir={tmp_path}"]
    line = LightningCLI(Narrow, Ones, args=["fit", *given, *quiet, "--trainer.max_steps=2", "--trainer.devices=1"])
    made = unwrap_optimizer(line.trainer.optimizers[0])
    assert (type(made), made.defaults["lr"]) == (hu.optim.AdamW, 1e-2)
    assert line.model.layer.weight.dtype == torch.bfloat16
    assert made.state[line.model.layer.weight]["step"] == 2


def test_a_recipe_that_scales_gradients_is_refused_by_name():
    with pytest.raises(ValueError, match="use AdaptiveMixed"):
        Recipe("fp16-adaptive")
    with pytest.raises(ValueError, match="did you mean 'bf16-split8'"):
        Recipe("bf16-splitt8")


UNDER_DDP = """
import os, sys, warnings
rank, path, seed = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
warnings.simplefilter("ignore")  # Lightning's advice
os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT="0")
import torch
import torch.distributed as dist
import lightning.pytorch as lightning
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from torch import nn
import halfulp as hu
from halfulp.integrations.lightning import Precision, Recipe

torch.set_num_threads(1)
dist.init_process_group("gloo", init_method="file://" + path, rank=rank, world_size=2)


class Module(lightning.LightningModule):
    def __init__(self, options):
        super().__init__()
        self.network = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 2))
        self.options, self.seen = options, []

    def training_step(self, batch, step):
        self.seen.append(batch)
        inputs, targets = batch
        return (self.network(inputs).float() - targets).square().mean()

    def configure_optimizers(self):
        return hu.AdamW(self.named_parameters(), lr=1e-2, weight_update="kahan", **self.options)


def fitted(options, **given):
    torch.manual_seed(seed)
    module = Module(options)
    found = torch.utils.data.TensorDataset(torch.randn(16, 8), torch.randn(16, 2))
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy=lightning.strategies.DDPStrategy(
            cluster_environment=TorchElasticEnvironment(), process_group_backend="gloo"),
        max_epochs=1, logger=False, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
        default_root_dir=os.path.dirname(path), **given)
    trainer.fit(module, torch.utils.data.DataLoader(found, batch_size=2))
    return module


module = fitted({}, plugins=[Recipe("bf16-kahan")], callbacks=[Precision()])

# The plain loop, on the batches that the sampler has given each process.
torch.manual_seed(seed)
plain = hu.convert(Module({}), "bf16-kahan")
optimizer = hu.AdamW(plain.named_parameters(), lr=1e-2, weight_update="kahan")
model = nn.parallel.DistributedDataParallel(plain.network)
assert len(module.seen) == 4
for inputs, targets in module.seen:
    (model(inputs).float() - targets).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
assert module.network[1].weight.dtype == torch.float32
for (name, one), other in zip(module.named_parameters(), plain.parameters(), strict=True):
    assert one.dtype == other.dtype and torch.equal(one, other), name

try:
    fitted({"param_dtype": "bf16"})
except ValueError as error:
    assert "give Trainer(plugins=[Recipe('bf16-split8')])" in str(error), error
else:
    raise AssertionError("narrowed under DistributedDataParallel")
dist.barrier()
sys.stdout.flush()
os._exit(0)
"""


def test_a_recipe_trains_under_ddp_and_a_late_narrowing_names_it(in_two_processes):
    in_two_processes(UNDER_DDP)
