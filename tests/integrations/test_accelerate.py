"""The scaler in an Accelerator, made before or after `prepare`; skipped where accelerate is missing."""

import copy

import pytest
import torch
from torch import nn

from halfulp.kernels import same_bits

accelerate = pytest.importorskip("accelerate")
from halfulp.integrations.accelerate import use_scaler  # noqa: E402

STEPS, SPIKE = 8, 4


def _trained(seed, order, folder, clip=0.5):
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    data = [(torch.randn(16, 4), torch.randn(16, 2)) for _ in range(STEPS)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if order == "before":
        use_scaler(accelerator, model, policy="dynamic")
    prepared, optimizer = accelerator.prepare(model, optimizer)
    if order == "after":
        use_scaler(accelerator, prepared, policy="dynamic")
    skipped = []
    for step, (inputs, targets) in enumerate(data):
        with accelerator.accumulate(prepared):
            loss = (prepared(inputs) - targets).square().mean()
            accelerator.backward(loss * 2.0**120 if step == SPIKE and order else loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(prepared.parameters(), clip)
            if order or step // 2 != SPIKE // 2:  # without a scaler the spike's step is left out by hand
                optimizer.step()
            optimizer.zero_grad()
            skipped.append(accelerator.optimizer_step_was_skipped)
    accelerator.save_state(folder)
    return accelerator, model, skipped


@pytest.mark.parametrize("order", ["before", "after"])
def test_the_parameters_are_those_of_a_training_without_a_scaler(order, seed, tmp_path):
    """Also clipped, though accelerate unscales under mixed_precision="fp16" alone."""
    accelerator, ours, skipped = _trained(seed, order, tmp_path)
    _, plain, _ = _trained(seed, None, tmp_path / "plain")
    assert all(same_bits(a.detach(), b.detach()) for a, b in zip(ours.parameters(), plain.parameters(), strict=True))
    assert [step for step in range(1, STEPS, 2) if skipped[step]] == [SPIKE + 1]
    before = accelerator.scaler.get_scale()
    assert before == 2.0**15
    accelerator.scaler.load_state_dict({**accelerator.scaler.state_dict()})
    accelerator.load_state(tmp_path)
    assert accelerator.scaler.get_scale() == before


def test_a_pickled_optimizer_goes_on_with_the_scaler(seed, tmp_path):
    accelerator, _, _ = _trained(seed, "after", tmp_path)
    prepared = accelerator._optimizers[-1]
    assert prepared.scaler is accelerator.scaler
    copied = copy.copy(prepared)
    assert copied.scaler is accelerator.scaler


def test_an_engine_of_its_own_is_refused(monkeypatch):
    accelerator = accelerate.Accelerator(cpu=True)
    monkeypatch.setattr(
        type(accelerator), "distributed_type", property(lambda self: accelerate.utils.DistributedType.DEEPSPEED)
    )
    with pytest.raises(NotImplementedError, match="DEEPSPEED scales losses in its own engine"):
        use_scaler(accelerator, nn.Linear(2, 2))


def test_a_model_that_accelerate_compiles_is_refused():
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(cpu=True, dynamo_backend="eager")
    try:
        with pytest.raises(ValueError, match="leave dynamo_backend out"):
            use_scaler(accelerator, nn.Linear(2, 2))
    finally:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
