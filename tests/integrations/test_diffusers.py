"""diffusers' methods of averages over hu.optim.EMA; beside diffusers' own where it is installed."""

import pytest
import torch

import halfulp as hu
from halfulp.integrations.diffusers import EMAModel
from halfulp.kernels import same_bits

DECAYS = [
    {},
    {"decay": 0.9, "use_ema_warmup": True, "power": 0.75, "inv_gamma": 2.0},
    {"decay": 0.99, "update_after_step": 3, "min_decay": 0.05},
]


def _pairs(seed):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
    moves = [[torch.randn_like(p) / 8 for p in model.parameters()] for _ in range(12)]
    return model, moves


def _move(model, move):
    with torch.no_grad():
        for parameter, change in zip(model.parameters(), move, strict=True):
            parameter.add_(change)


@pytest.mark.parametrize("options", DECAYS)
def test_averages_are_diffusers_own(options, seed):
    theirs_class = pytest.importorskip("diffusers.training_utils").EMAModel
    model, moves = _pairs(seed)
    theirs, ours = theirs_class(model.parameters(), **options), EMAModel(model, **options)
    assert ours.cur_decay_value is theirs.cur_decay_value is None
    for move in moves:
        _move(model, move)
        theirs.step(model.parameters())
        ours.step(model.parameters())
        assert ours.cur_decay_value == theirs.cur_decay_value
    other = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
    ours.copy_to(other.parameters())
    for mine, shadow in zip(other.parameters(), theirs.shadow_params, strict=True):
        torch.testing.assert_close(mine.detach(), shadow, rtol=1e-5, atol=1e-6)


def test_narrow_averages_move(seed):
    model, _ = _pairs(seed)
    model.bfloat16()
    ema = EMAModel(model, decay=0.999, update_after_step=-10_000)
    start = [p.detach().float() for p in model.parameters()]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    for _ in range(200):
        ema.step(model.parameters())
    averages = ema.ema.float32_state_dict()
    for first, (name, _) in zip(start, model.named_parameters(), strict=True):
        torch.testing.assert_close(averages[name], first * 0.999**200, rtol=0.02, atol=1e-4)


def test_store_and_restore_leave_the_weights_as_they_were(seed):
    model, moves = _pairs(seed)
    model.bfloat16()
    ema = EMAModel(model, decay=0.9)
    for move in moves:
        _move(model, move)
        ema.step(model.parameters())
    before = [p.detach().clone() for p in model.parameters()]
    ema.store(model.parameters())
    ema.copy_to(model.parameters())
    assert not all(same_bits(p.detach(), b) for p, b in zip(model.parameters(), before, strict=True))
    ema.restore(model.parameters())
    assert all(same_bits(p.detach(), b) for p, b in zip(model.parameters(), before, strict=True))
    with pytest.raises(RuntimeError, match="no weights are stored"):
        ema.restore(model.parameters())


def test_a_state_is_loaded(seed):
    model, moves = _pairs(seed)
    one, other = EMAModel(model, decay=0.9), EMAModel(model, decay=0.5)
    for move in moves:
        _move(model, move)
        one.step(model.parameters())
    other.load_state_dict(one.state_dict())
    assert other.decay == 0.9
    assert other.optimization_step == one.optimization_step
    ours, theirs = one.ema.float32_state_dict(), other.ema.float32_state_dict()
    assert all(same_bits(ours[name], theirs[name]) for name in ours)
    with pytest.raises(ValueError, match="diffusers' own"):
        other.load_state_dict({"decay": 0.9, "shadow_params": []})


def test_a_model_is_saved_with_its_averages(seed, tmp_path):
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(seed)
    sizes = {"sample_size": 8, "block_out_channels": (8, 8), "norm_num_groups": 4, "layers_per_block": 1}
    blocks = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2}
    model = diffusers.UNet2DModel(**sizes, **blocks)
    ema = EMAModel(model, decay=0.5, model_cls=diffusers.UNet2DModel, model_config=model.config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.25)
    ema.step(model.parameters())
    ema.save_pretrained(tmp_path)
    saved = diffusers.UNet2DModel.from_pretrained(tmp_path)
    averages = ema.ema.float32_state_dict()
    assert all(same_bits(p.detach(), averages[name]) for name, p in saved.named_parameters())


def test_parameters_that_diffusers_has_cast_are_narrowed_again(seed):
    """Its scripts make trained parameters float32 before they make the optimizer."""
    cast = pytest.importorskip("diffusers.training_utils").cast_training_params
    model, _ = _pairs(seed)
    model.bfloat16()
    cast(model)
    assert model[0].weight.dtype == torch.float32
    hu.AdamW(model.named_parameters(), lr=1e-3, param_dtype="bf16", weight_update="split8")
    assert model[0].weight.dtype == torch.bfloat16


def test_what_is_wrong_is_said():
    model = torch.nn.Linear(2, 2)
    with pytest.raises(TypeError, match="takes the model"):
        EMAModel(model.parameters())
    ema = EMAModel(model)
    with pytest.raises(ValueError, match="not the parameters of the model"):
        ema.step(torch.nn.Linear(2, 2).parameters())
    with pytest.raises(ValueError, match="give those of its class"):
        ema.copy_to(torch.nn.Linear(3, 2).parameters())
    with pytest.raises(ValueError, match="needs EMAModel"):
        ema.save_pretrained("nowhere")
