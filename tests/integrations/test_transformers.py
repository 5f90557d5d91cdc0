"""The optimizer and the callback inside transformers' Trainer; skipped where accelerate is missing."""

import copy
import json

import pytest
import torch

import halfulp as hu
from halfulp.kernels import same_bits

from .sharding import SHARDED

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
from safetensors.torch import load_file  # noqa: E402  comes with transformers

from halfulp.integrations.transformers import PrecisionCallback, optimizer  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # advice of transformers
STEPS, STOP = 6, 4
OPTIONS = {"weight_update": "kahan", "param_dtype": "bf16", "state_dtype": "8bit", "report_interval": 1}


def _model(seed, dropout=0.1):
    torch.manual_seed(seed)
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 32, "n_positions": 8}
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**sizes, resid_pdrop=dropout, embd_pdrop=0.0, attn_pdrop=0.0)
    )


class _Stop(transformers.TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **more):
        control.should_training_stop |= state.global_step >= self.step


def _arguments(folder, **more):
    return transformers.TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        max_steps=STEPS,
        save_steps=2,
        logging_steps=2,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        weight_decay=0.1,
        report_to=[],
        disable_tqdm=True,
        **more,
    )


def _trained(seed, folder, steps=STEPS, resume=None, rule="AdamW", **options):
    arguments = _arguments(folder)
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(32, (8,), generator=generator) for _ in range(16)]
    trainer = transformers.Trainer(
        model=_model(seed),
        args=arguments,
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        optimizer_cls_and_kwargs=optimizer(arguments, rule, **options),
        callbacks=[_Stop(steps), PrecisionCallback()],
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def _equal(a, b):
    return all(same_bits(p.detach(), q.detach()) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def test_a_run_has_names_groups_and_resumes_to_the_bit(seed, tmp_path):
    whole = _trained(seed, tmp_path / "whole", **OPTIONS)
    _trained(seed, tmp_path / "half", STOP, **OPTIONS)
    resumed = _trained(seed, tmp_path / "half", resume=str(tmp_path / "half" / f"checkpoint-{STOP}"), **OPTIONS)
    assert _equal(whole.model, resumed.model)
    assert {p.dtype for p in whole.model.parameters()} == {torch.bfloat16}
    decaying, other = whole.optimizer.optimizer.param_groups
    assert (decaying["weight_decay"], other["weight_decay"]) == (0.1, 0.0)
    assert "transformer.wte.weight" in decaying["param_names"]
    assert "transformer.ln_f.weight" in other["param_names"]


@pytest.mark.parametrize("update", ["stochastic", "kahan", "split8"])
def test_it_trains_as_the_plain_loop_does(update, seed, tmp_path):
    options = {"weight_update": update, "param_dtype": "bf16"}
    arguments, seen = _arguments(tmp_path, save_strategy="no"), []

    class Recording(transformers.Trainer):
        def compute_loss(self, model, inputs, *given, **more):
            count = more["num_items_in_batch"]
            seen.append(({**inputs, "num_items_in_batch": count}, self.lr_scheduler.get_last_lr()[0]))
            return super().compute_loss(model, inputs, *given, **more)

    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(32, (8,), generator=generator) for _ in range(16)]
    model, plain = _model(seed, 0.0), _model(seed, 0.0)
    trainer = Recording(
        model=model,
        args=arguments,
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        optimizer_cls_and_kwargs=optimizer(arguments, **options),
    )
    trainer.train()
    wanted = set(trainer.get_decay_parameter_names(plain))
    named = list(plain.named_parameters())
    groups = [
        {"params": [(n, p) for n, p in named if n in wanted], "weight_decay": 0.1},
        {"params": [(n, p) for n, p in named if n not in wanted], "weight_decay": 0.0},
    ]
    own = hu.AdamW(groups, **options)
    for inputs, rate in seen:
        for group in own.param_groups:
            group["lr"] = rate
        plain(**inputs).loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), arguments.max_grad_norm)
        own.step()
        own.zero_grad()
    assert len(seen) == STEPS
    assert _equal(model, plain)


def test_checkpoints_hold_the_contract_and_float32_weights(seed, tmp_path):
    trainer = _trained(seed, tmp_path, **OPTIONS)
    folder = tmp_path / f"checkpoint-{STEPS}"
    held = hu.recipes.Contract.from_dict(json.loads((folder / "precision_contract.json").read_text()))
    held.check(trainer.model, trainer.optimizer)
    saved = load_file(folder / "float32_weights.safetensors")
    wanted = trainer.optimizer.optimizer.float32_state_dict(trainer.model)
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}
    assert all(same_bits(saved[name], wanted[name]) for name in saved)
    assert any(not same_bits(value, value.bfloat16().float()) for value in saved.values()), "low bits are there"


def test_a_run_that_comes_back_in_another_precision_is_refused(seed, tmp_path):
    _trained(seed, tmp_path, STOP, **OPTIONS)
    other = {**OPTIONS, "weight_update": "stochastic"}
    folder = tmp_path / f"checkpoint-{STOP}"
    with pytest.raises(ValueError, match="saved with weight_update=Kahan"):
        _trained(seed, tmp_path, resume=str(folder), **other)
    file = folder / "precision_contract.json"
    file.write_text(file.read_text().replace("bfloat16", "float32", 1))
    with pytest.raises(ValueError, match=r"contract does not hold: transformer\.wte\.weight: dtype was"):
        _trained(seed, tmp_path, resume=str(folder), **OPTIONS)


def test_logs_say_what_is_lost(seed, tmp_path):
    trainer = _trained(seed, tmp_path, weight_update="nearest", param_dtype="bf16", report_interval=1)
    logged = [entry["lost_updates"] for entry in trainer.state.log_history if "lost_updates" in entry]
    assert logged
    assert 0 <= min(logged) <= max(logged) <= 1
    saved = json.loads((tmp_path / f"checkpoint-{STEPS}" / "trainer_state.json").read_text())
    assert any("lost_updates" in entry for entry in saved["log_history"])


def test_options_come_from_the_arguments_too(tmp_path):
    arguments = _arguments(tmp_path, optim_args="weight_update=split8, seed=3", adam_beta2=0.95)
    make, options = optimizer(arguments, seed=4)
    made = make()(_model(0).bfloat16(), **options)
    assert made.defaults["betas"] == (0.9, 0.95)
    assert made.defaults["seed"] == 4
    assert made.param_groups[0]["weight_update"].name == "split8"
    for words, options, decay in (("weight_decay=0.05", {}, 0.05), ("weight_decay=0.05", {"weight_decay": 0.02}, 0.02)):
        make, chosen = optimizer(_arguments(tmp_path, optim_args=words), **options)
        made = make()(_model(0).bfloat16(), **chosen)
        assert [group["weight_decay"] for group in made.param_groups] == [decay, 0.0]


@pytest.mark.parametrize("rule", hu.optim.OPTIMIZERS)
def test_every_optimizer_is_made(rule, tmp_path):
    make, options = optimizer(_arguments(tmp_path), rule, weight_update="stochastic")
    model = _model(0).bfloat16()
    made = make()(model, **options)
    assert sum(len(group["params"]) for group in made.param_groups) == len(list(model.parameters()))
    if rule == "Muon":
        names = [name for group in made.param_groups if group["use_muon"] for name in group["param_names"]]
        assert names
        assert all(dict(model.named_parameters())[name].dim() == 2 for name in names)
        assert not any("wte" in name for name in names)


def test_what_is_wrong_is_said(tmp_path):
    with pytest.raises(ValueError, match="unknown optimizer 'AdamV'; did you mean 'Adam'"):
        optimizer(_arguments(tmp_path), "AdamV")
    with pytest.raises(ValueError, match=r"unknown optimizer .*RMSprop"):
        optimizer(_arguments(tmp_path), torch.optim.RMSprop)
    with pytest.raises(ValueError, match="write name=value,name=value"):
        optimizer(_arguments(tmp_path, optim_args="kahan"))
    make, options = optimizer(_arguments(tmp_path))
    with pytest.raises(ValueError, match="nothing is to be trained"):
        make()(_model(0).requires_grad_(False), **options)


def test_optimizers_of_the_trainer_are_refused_under_fsdp_where_the_factory_is_taken(tmp_path, monkeypatch):
    """Why the entrance is `optimizer_cls_and_kwargs`, whose dictionary has the rate, as the Trainer adds none."""
    create = transformers.Trainer.create_accelerator_and_postprocess

    def under_fsdp(trainer):
        create(trainer)
        trainer.is_fsdp_enabled = True

    monkeypatch.setattr(transformers.Trainer, "create_accelerator_and_postprocess", under_fsdp)
    arguments, model = _arguments(tmp_path), _model(0)
    with pytest.raises(RuntimeError, match="Passing `optimizers` is not allowed"):
        transformers.Trainer(model, arguments, optimizers=(hu.AdamW(model.parameters()), None))
    trainer = transformers.Trainer(model, arguments, optimizer_cls_and_kwargs=optimizer(arguments))
    assert trainer.create_optimizer().param_groups[0]["lr"] == arguments.learning_rate == 1e-2


def test_an_observation_begun_before_training_blames_no_parameter(tmp_path):
    """The Trainer makes the optimizer later: what is not seen is said, and nothing is called never stepped."""
    arguments = _arguments(tmp_path)
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(32, (16, 8))]
    given = optimizer(arguments, weight_update="kahan", param_dtype="bf16")
    trainer = transformers.Trainer(_model(0), arguments, train_dataset=rows, optimizer_cls_and_kwargs=given)
    with hu.observe(trainer.model, interval=1) as seen:
        trainer.train()
    assert not [finding.code for finding in seen.findings]
    assert any("no optimizer was given" in sentence for sentence in seen.record.unseen)


def test_fsdp1_is_refused_by_name(tmp_path):
    make, options = optimizer(_arguments(tmp_path))
    with pytest.raises(NotImplementedError, match="FSDP1 flattens parameters"):
        make()(type("FullyShardedDataParallel", (torch.nn.Module,), {})(), **options)


def test_a_full_disk_leaves_the_files_of_the_checkpoint_before(seed, tmp_path, monkeypatch):
    trainer = _trained(seed, tmp_path, **OPTIONS)
    folder = tmp_path / f"checkpoint-{STEPS}"
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}

    def full(tensors, path, **more):
        with open(path, "wb") as file:
            file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("halfulp.integrations.transformers.save_file", full)
    given = {"model": trainer.model, "optimizer": trainer.optimizer}
    with pytest.raises(OSError, match="No space left"):
        PrecisionCallback().on_save(trainer.args, trainer.state, trainer.control, **given)
    assert all((folder / name).read_bytes() == content for name, content in before.items())


@pytest.mark.parametrize("is_cast", [True, False])
def test_adapters_of_a_narrow_model_train_and_resume(is_cast, seed):
    """PEFT makes the adapters of a bfloat16 model float32 unless it is told not to; `param_dtype=` narrows both."""
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)

    def made(saved=None):
        torch.manual_seed(seed)
        model = peft.get_peft_model(_model(seed, 0.0).bfloat16(), settings, autocast_adapter_dtype=is_cast)
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        assert {p.dtype for _, p in trained} == {torch.float32 if is_cast else torch.bfloat16}
        if saved is not None:  # as Trainer's resume does, into float32
            model.load_state_dict(saved["model"])
        own = hu.AdamW(trained, lr=1e-2, weight_update="kahan", param_dtype="bf16")
        if saved is not None:
            own.load_state_dict(saved["optimizer"])
        return model, own, trained

    def stepped(model, own, steps):
        for step in steps:
            row = torch.randint(32, (2, 8), generator=torch.Generator().manual_seed(step))
            model(input_ids=row, labels=row).loss.backward()
            own.step()
            own.zero_grad()

    model, own, trained = made()
    assert {p.dtype for _, p in trained} == {torch.bfloat16}
    stepped(model, own, range(3))
    saved = {
        "model": {k: v.clone() for k, v in model.state_dict().items()},
        "optimizer": copy.deepcopy(own.state_dict()),
    }
    stepped(model, own, range(3, 6))
    again, other, _ = made(saved)
    stepped(again, other, range(3, 6))
    assert _equal(model, again)


UNDER_FSDP = """
import transformers
from halfulp.integrations.transformers import PrecisionCallback, optimizer


class Stop(transformers.TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **more):
        control.should_training_stop |= state.global_step >= self.step


def trainer(folder, steps=6, **options):
    AcceleratorState._reset_state(reset_partial_state=True)
    wrapped = {"transformer_layer_cls_to_wrap": ["GPT2Block"], "state_dict_type": "SHARDED_STATE_DICT"}
    arguments = transformers.TrainingArguments(
        output_dir=folder, use_cpu=True, max_steps=6, save_steps=3, per_device_train_batch_size=2, learning_rate=1e-2,
        weight_decay=0.1, report_to=[], disable_tqdm=True, fsdp=True, fsdp_config=wrapped, logging_steps=3,
    )
    torch.manual_seed(seed)
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 32, "n_positions": 8, "resid_pdrop": 0.0}
    config = transformers.GPT2Config(**sizes, embd_pdrop=0.0, attn_pdrop=0.0)
    model = transformers.GPT2LMHeadModel(config)
    rows = [torch.randint(32, (8,), generator=torch.Generator().manual_seed(seed + k)) for k in range(32)]
    if "optimizers" not in options:
        narrow = {"weight_update": "split8", "param_dtype": "bf16", "state_dtype": "8bit", "report_interval": 1}
        options["optimizer_cls_and_kwargs"] = optimizer(arguments, "AdamW", **narrow)
    else:
        options["optimizers"] = (torch.optim.SGD(model.parameters(), lr=0.1), None)
    data = [{"input_ids": row, "labels": row} for row in rows]
    return transformers.Trainer(
        model, arguments, train_dataset=data, callbacks=[Stop(steps), PrecisionCallback()], **options
    )


def whole(trainer):
    return [p.detach().full_tensor() for p in trainer.model.parameters()]


first = trainer(path + "whole")
first.train()
assert {p.dtype for p in first.model.parameters()} == {torch.bfloat16}
assert all(hasattr(p, "_local_tensor") for p in first.model.parameters())
names = [name for group in first.optimizer.optimizer.param_groups for name in group["param_names"]]
assert "transformer.wte.weight" in names and "transformer.h.0.ln_1.weight" in names
half = trainer(path + "half", 3)
half.train()
again = trainer(path + "half")
again.train(resume_from_checkpoint=path + "half/checkpoint-3")
assert all(map(torch.equal, whole(first), whole(again)))
try:
    trainer(path + "refused", optimizers=True)
except RuntimeError as error:
    assert "`optimizers` is not allowed" in str(error)
else:
    raise AssertionError("optimizers= was taken")
end()
"""


def test_the_factory_trains_and_resumes_under_fsdp2(in_two_processes):
    in_two_processes(SHARDED + UNDER_FSDP)
