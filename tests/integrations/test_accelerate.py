"""The scaler in an Accelerator, made before or after `prepare`; skipped where accelerate is missing."""

import copy

import pytest
import torch
from torch import nn

from halfulp.kernels import same_bits

from .sharding import SHARDED

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


def test_optimizers_of_one_backward_pass_are_stepped_by_the_scaler(seed):
    """A prepared one's step ends the iteration, so that the second one's is refused."""
    accelerator = accelerate.Accelerator(cpu=True)
    torch.manual_seed(seed)
    model, inputs = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)), torch.randn(16, 4)
    plain = copy.deepcopy(model)
    scaler = use_scaler(accelerator, model)
    both = accelerator.prepare(*(torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model))
    for one, other in ((model, both), (plain, [torch.optim.SGD(plain.parameters(), lr=0.1)])):
        loss = one(inputs).square().mean()
        accelerator.backward(loss) if one is model else loss.backward()
        for optimizer in other:
            scaler.step(optimizer.optimizer) if one is model else optimizer.step()
    scaler.update()
    assert all(same_bits(a.detach(), b.detach()) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    accelerator.backward(model(inputs).square().mean())
    accelerator.clip_grad_norm_(model.parameters(), 0.1)
    both[0].step()
    scaler.get_scale()  # as for a log
    with pytest.raises(ValueError, match=r"accelerate and Lightning call each: there call scaler\.step\(one"):
        both[1].step()


def test_a_pickled_optimizer_goes_on_with_the_scaler(seed, tmp_path):
    accelerator, _, _ = _trained(seed, "after", tmp_path)
    prepared = accelerator._optimizers[-1]
    assert prepared.scaler is accelerator.scaler
    copied = copy.copy(prepared)
    assert copied.scaler is accelerator.scaler


BEFORE_PREPARE = """
inputs = torch.randn(6, 2, 4, 8, generator=torch.Generator().manual_seed(seed))


def net():
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def train(model, optimizer, backward, steps):
    for step in steps:
        optimizer.zero_grad()
        backward(model(inputs[step, rank].bfloat16()).float().square().mean())
        optimizer.step()


def whole(model):
    return [p.detach().full_tensor() for p in model.parameters()]


def prepared(options):
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=1, cpu_ram_efficient_loading=False,
        state_dict_type="SHARDED_STATE_DICT",
    )
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(cpu=True, fsdp_plugin=plugin, mixed_precision="no")
    assert accelerator.is_fsdp2
    model = net()
    optimizer = hu.AdamW(model.named_parameters(), lr=1e-2, param_dtype="bf16", **options)
    return accelerator, *accelerator.prepare(model, optimizer)


for options in ({"weight_update": "stochastic"}, {"weight_update": "split8", "state_dtype": "8bit"}):
    accelerator, model, optimizer = prepared(options)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert all(hasattr(p, "_local_tensor") for p in model.parameters())
    train(model, optimizer, accelerator.backward, range(3))
    folder = path + options["weight_update"]
    accelerator.save_state(folder)
    train(model, optimizer, accelerator.backward, range(3, 6))
    plain, mesh = net(), init_device_mesh("cpu", (2,))
    hu.AdamW(plain.named_parameters(), param_dtype="bf16", **options)  # narrowed alike; its low bits go with it
    fully_shard(plain[0], mesh=mesh)
    fully_shard(plain[2], mesh=mesh)
    fully_shard(plain, mesh=mesh)
    own = hu.AdamW(plain.named_parameters(), lr=1e-2, **options)
    train(plain, own, torch.Tensor.backward, range(6))
    assert all(map(torch.equal, whole(model), whole(plain))), options
    accelerator, model, optimizer = prepared(options)
    accelerator.load_state(folder)
    train(model, optimizer, accelerator.backward, range(3, 6))
    assert all(map(torch.equal, whole(model), whole(plain))), ("resumed", options)

# Any other mixed_precision casts what the optimizer has narrowed to float32.
plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=False)
AcceleratorState._reset_state(reset_partial_state=True)
accelerator = accelerate.Accelerator(cpu=True, fsdp_plugin=plugin, mixed_precision="bf16")
model = net()
optimizer = hu.AdamW(model.named_parameters(), lr=1e-2, param_dtype="bf16", weight_update="kahan")
model, optimizer = accelerator.prepare(model, optimizer)
try:
    accelerator.backward(model(inputs[0, rank]).float().square().mean())
    optimizer.step()
except ValueError as error:
    assert "is torch.float32, but its group holds torch.bfloat16" in str(error), error
else:
    raise AssertionError("the cast was not seen")
end()
"""


def test_an_optimizer_made_before_fsdp2_trains_shards_and_resumes(in_two_processes):
    in_two_processes(SHARDED + BEFORE_PREPARE)


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("order", ["before", "after"])
def test_a_copied_model_computes_with_its_own_weights(order, precision, seed):
    """Under autocast accelerate puts a forward of its own into the model, which may close over the scaler's."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    try:
        accelerator = accelerate.Accelerator(cpu=True, mixed_precision=precision)
        torch.manual_seed(seed)
        model = nn.Linear(4, 2)
        if order == "before":
            use_scaler(accelerator, model)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        if order == "after":
            use_scaler(accelerator, model)
        copied = copy.deepcopy(model)
        with torch.no_grad():
            copied.weight.zero_()
            copied.bias.zero_()
        x = torch.ones(1, 4)
        assert not copied(x).any()
        assert model(x).any()
        assert model(x).dtype == torch.float32
        accelerator.backward(model(x).square().mean())
        assert copied.weight.grad is None
        optimizer.step()
        assert model.weight.grad.any()
    finally:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("DEEPSPEED", "DEEPSPEED scales losses in its own engine"),
        ("MEGATRON_LM", "MEGATRON_LM scales losses in its own engine"),
        ("FSDP", "FSDP1 flattens parameters.*take fsdp_version=2"),
    ],
)
def test_an_engine_of_its_own_is_refused(kind, words, monkeypatch):
    accelerator = accelerate.Accelerator(cpu=True)
    of_kind = getattr(accelerate.utils.DistributedType, kind)
    monkeypatch.setattr(type(accelerator), "distributed_type", property(lambda self: of_kind))
    monkeypatch.setattr(type(accelerator), "is_fsdp2", property(lambda self: False))
    with pytest.raises(NotImplementedError, match=words):
        use_scaler(accelerator, nn.Linear(2, 2))


def test_a_model_that_accelerate_compiles_is_refused():
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(cpu=True, dynamo_backend="eager")
    try:
        with pytest.raises(ValueError, match="leave dynamo_backend out"):
            use_scaler(accelerator, nn.Linear(2, 2))
    finally:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
