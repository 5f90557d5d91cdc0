"""Changed models in transformers' Trainer: a resumed run is an uninterrupted one, and what it saves is what it trained.

Skipped where accelerate is missing, without which the Trainer does not start.
"""

import pytest
import torch

import halfulp as hu

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
from safetensors.torch import load_file  # noqa: E402  comes with transformers

pytestmark = pytest.mark.filterwarnings("ignore")  # advice of transformers
STEPS, STOP = 6, 4


def _scaled(model):
    return hu.scalify(model)


def _components(model):
    return hu.multicomponent(model, 2, torch.bfloat16)


def _plain(model):
    return model


def _converted(model):
    return hu.convert(model, "bf16-split8")


def _own(model, **options):
    return hu.optim.AdamW(model.named_parameters(), lr=1e-2, **options)


def _narrow(model):
    return _own(model, param_dtype=torch.bfloat16)


def _of_recipe(model):
    return hu.recipes.optimizer(model, "AdamW", lr=1e-2)


# How the model is changed, and its optimizer; None for the Trainer's own.
KINDS = {
    "scalify": (_scaled, _own),
    "scalify, the Trainer's optimizer": (_scaled, None),
    "multicomponent": (_components, _own),
    "multicomponent, the Trainer's optimizer": (_components, None),
    "param_dtype": (_plain, _narrow),
    "convert": (_converted, _of_recipe),
}


class _Stop(transformers.TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **more):
        control.should_training_stop |= state.global_step >= self.step


def _model(seed, change):
    torch.manual_seed(seed)
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 32, "n_positions": 8}
    return change(transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, resid_pdrop=0.1)))


def _trained(seed, folder, kind, steps, resume=None):
    change, make = KINDS[kind]
    model = _model(seed, change)
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(32, (8,), generator=generator) for _ in range(16)]
    arguments = transformers.TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        max_steps=STEPS,
        save_steps=2,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        optim="adamw_torch",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = transformers.Trainer(
        model=model,
        args=arguments,
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        optimizers=(make and make(model), None),
        callbacks=[_Stop(steps)],
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def _value(parameter):
    parameter = parameter.detach()
    return parameter.decode(torch.float64) if hasattr(parameter, "decode") else parameter.double()


def _equal(a, b):
    return all(torch.equal(_value(p), _value(q)) for p, q in zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_training_has_the_bits_of_an_uninterrupted_one(kind, seed, tmp_path):
    whole = _trained(seed, tmp_path / "whole", kind, STEPS)
    _trained(seed, tmp_path / "half", kind, STOP)
    resumed = _trained(seed, tmp_path / "half", kind, STEPS, str(tmp_path / "half" / f"checkpoint-{STOP}"))
    assert resumed.state.global_step == STEPS
    assert _equal(whole.model, resumed.model)
    if hasattr(whole.optimizer.optimizer, "float32_state_dict"):
        ours, theirs = (t.optimizer.optimizer.float32_state_dict(t.model) for t in (whole, resumed))
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)

    whole.save_model(tmp_path / "saved")
    other = _model(seed + 1, KINDS[kind][0])
    if kind == "param_dtype":
        other.bfloat16()
    report = other.load_state_dict(load_file(tmp_path / "saved" / "model.safetensors"), strict=False)
    assert report.missing_keys == ["lm_head.weight"], "tied, and written once"
    assert not report.unexpected_keys
    assert _equal(whole.model, other)
    again, report = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not report["missing_keys"]
    if kind.startswith("scalify"):
        assert _equal(whole.model, again), "a plain model has a scaled one's numbers in float32"
