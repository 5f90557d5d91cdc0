"""The scaler inside accelerate and Lightning, where they are installed: their own hooks call it as torch's."""

import importlib

import pytest
import torch
from torch import nn

import halfulp as hu
from halfulp.kernels import same_bits

STEPS, SPIKE = 8, 4


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def scaler_of(kind: str, model: nn.Module) -> torch.amp.GradScaler:
    if kind == "torch":
        return torch.amp.GradScaler("cpu")
    return hu.AdaptiveGradScaler(model, policy=kind)


def equal(ours: nn.Module, theirs: nn.Module) -> bool:
    return all(same_bits(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


def accelerated(kind: str, seed: int, folder, monkeypatch, order: str = "before"):
    """A training by accelerate as on a GPU in fp16, one spike in its loss: model, scaler and which steps it skipped."""
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    # On a processor it trains in float32 alone.
    monkeypatch.setattr(accelerate.state.AcceleratorState, "mixed_precision", "fp16")
    accelerator.native_amp = True
    torch.manual_seed(seed)
    model, data = network(), [(torch.randn(16, 4), torch.randn(16, 2)) for _ in range(STEPS)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if order == "before":
        accelerator.scaler = scaler_of(kind, model)
        prepared, optimizer = accelerator.prepare(model, optimizer)
    else:
        accelerator.scaler = torch.amp.GradScaler("cpu")
        prepared, optimizer = accelerator.prepare(model, optimizer)
        accelerator.scaler = optimizer.scaler = scaler_of(kind, prepared)
    skipped = []
    for step, (inputs, targets) in enumerate(data):
        with accelerator.accumulate(prepared):
            loss = (prepared(inputs) - targets).square().mean()
            accelerator.backward(loss * 2.0**40 if step == SPIKE else loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(prepared.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            skipped.append(accelerator.optimizer_step_was_skipped)
    accelerator.save_state(folder)
    return accelerator, model, skipped


@pytest.mark.parametrize("order", ["before", "after"])
def test_accelerate_trains_as_with_torchs_scaler(order, seed, tmp_path, monkeypatch):
    _, ours, skipped = accelerated("dynamic", seed, tmp_path, monkeypatch, order)
    _, theirs, wanted = accelerated("torch", seed, tmp_path, monkeypatch)
    assert equal(ours, theirs)
    assert skipped == wanted
    assert any(skipped)


def test_accelerate_trains_with_exponents_and_saves_them(seed, tmp_path, monkeypatch):
    accelerator, _, skipped = accelerated("amax", seed, tmp_path, monkeypatch)
    scaler = accelerator.scaler
    assert any(skipped)
    assert scaler.last_step.applied == (not skipped[-1])
    before = {row.site: row.exponent for row in scaler.sites().rows}
    assert set(before) == {"global", "0", "2"}
    assert scaler.sites()["2"].format == "fp16"
    scaler.set_exponents(dict.fromkeys(before, 3))
    accelerator.load_state(tmp_path)
    assert {row.site: row.exponent for row in scaler.sites().rows} == before


@pytest.mark.filterwarnings("ignore")  # advice of transformers
@pytest.mark.parametrize("kind", ["amax", "dynamic"])
def test_trainer_trains_as_without_a_scaler(kind, seed, tmp_path):
    pytest.importorskip("accelerate")
    transformers = pytest.importorskip("transformers")
    sizes = dict.fromkeys(("hidden_size", "intermediate_size", "vocab_size"), 16)
    config = transformers.BertConfig(**sizes, num_hidden_layers=1, num_attention_heads=2)
    data = [{"input_ids": torch.randint(16, (8,)), "labels": torch.tensor(i % 2)} for i in range(8)]
    options = {"max_grad_norm": 0.0, "save_strategy": "no", "report_to": [], "disable_tqdm": True}
    arguments = transformers.TrainingArguments(output_dir=tmp_path, use_cpu=True, max_steps=STEPS, **options)

    def trained(scaled: bool):
        torch.manual_seed(seed)
        model = transformers.BertForSequenceClassification(config)
        trainer = transformers.Trainer(model=model, args=arguments, train_dataset=data)
        if scaled:
            trainer.accelerator.scaler = scaler_of(kind, model)
        trainer.train()
        return model, trainer.accelerator.scaler

    (ours, scaler), (theirs, _) = trained(True), trained(False)
    assert equal(ours, theirs)
    assert scaler.last_step.applied
    assert kind != "amax" or len(scaler.sites().rows) > 2


def fitted(package: str, kind: str, seed: int, folder, epochs: int = 2, start=None):
    """A training by Lightning in fp16, one spike in its loss: module, scaler and trainer."""
    lightning = pytest.importorskip(package)
    precision = importlib.import_module(f"{package}.plugins.precision")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.network = network()

        def forward(self, inputs):
            return self.network(inputs)

        def training_step(self, batch, step):
            inputs, targets = batch
            loss = (self(inputs) - targets).square().mean()
            return loss * 2.0**40 if step == SPIKE else loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    torch.manual_seed(seed)
    module = Module()
    data = torch.utils.data.TensorDataset(torch.randn(8 * STEPS, 4), torch.randn(8 * STEPS, 2))
    scaler = scaler_of(kind, module)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=epochs,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        default_root_dir=folder,
        plugins=[precision.MixedPrecision(precision="16-mixed", device="cpu", scaler=scaler)],
        **quiet,
    )
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=8), ckpt_path=start)
    return module, scaler, trainer


@pytest.mark.filterwarnings("ignore")  # Lightning's advice on numbers of workers
@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
class TestLightning:
    def test_it_trains_as_with_torchs_scaler(self, package, seed, tmp_path):
        ours, scaler, _ = fitted(package, "dynamic", seed, tmp_path)
        theirs, wanted, _ = fitted(package, "torch", seed, tmp_path)
        assert equal(ours, theirs)
        assert scaler.get_scale() == wanted.get_scale() < 2.0**16

    def test_a_resumed_training_has_the_exponents_of_an_uninterrupted_one(self, package, seed, tmp_path):
        whole, uninterrupted, _ = fitted(package, "amax", seed, tmp_path)
        half, _, trainer = fitted(package, "amax", seed, tmp_path, epochs=1)
        trainer.save_checkpoint(tmp_path / "half.ckpt")
        resumed, scaler, _ = fitted(package, "amax", seed, tmp_path, start=tmp_path / "half.ckpt")
        assert not equal(half, resumed)
        assert equal(whole, resumed)
        assert scaler.state_dict() == uninterrupted.state_dict()
        assert any(row.overflows and row.format == "fp16" for row in scaler.sites().rows)
