"""Averages that stand still are told at an optimizer's steps, of whatever library and whenever they were made."""

import copy
import gc
import importlib
import pickle
import warnings

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn

import halfulp as hu
from halfulp.kernels import _engine as _engines
from halfulp.subclass.models import _averages
from halfulp.subclass.models import _parameter_holders as _outer_modules

DECAY, UPDATES = 0.999, 200


@pytest.fixture(autouse=True)
def _untold(monkeypatch):
    """What has been told in this process may be told again, and nothing was searched for or hooked so far."""
    monkeypatch.setattr(_engines, "_fallback_counts", type(_engines._fallback_counts)())
    monkeypatch.setattr(_averages._LastSearch, "reference_counts", [])
    hooks = torch.nn.modules.module._global_module_registration_hooks
    before = dict(hooks)
    hooks.clear()
    monkeypatch.setattr(_averages, "_hook_handles", [])
    monkeypatch.setattr(_outer_modules, "_registration_hooks", [])  # whose hooks are cleared too
    yield
    hooks.clear()
    hooks.update(before)


class EMAModel:
    """As in diffusers: clones of the parameters in a list, in an object that is no module."""

    def __init__(self, parameters, decay=DECAY):
        self.decay, self.temp_stored_params = decay, None
        self.shadow_params = [p.clone().detach() for p in parameters]

    @torch.no_grad()
    def step(self, parameters):
        for mean, p in zip(self.shadow_params, parameters):
            mean.sub_((1 - self.decay) * (mean - p))


class ModelEmaV3(torch.nn.Module):
    """As in timm: a module with a copy of the model, which may be wide, or narrow and rounded stochastically."""

    def __init__(self, model, decay=DECAY, dtype=None, stochastic_rounding=False):
        super().__init__()
        self.module, self.decay, self.stochastic_rounding = copy.deepcopy(model).eval(), decay, stochastic_rounding
        if dtype is not None:
            self.module.to(dtype=dtype)

    @torch.no_grad()
    def update(self, model):
        for mean, p in zip(self.module.state_dict().values(), model.state_dict().values()):
            mean.lerp_(p.to(mean.dtype), 1 - self.decay)


class LitEma(torch.nn.Module):
    """As in latent diffusion: buffers under other names."""

    def __init__(self, model):
        super().__init__()
        for name, parameter in model.named_parameters():
            self.register_buffer(name.replace(".", ""), parameter.detach().clone())


class ModelEma:
    """As users write it: the model, and a dict of averages by its names."""

    def __init__(self, model):
        self.model, self.shadow = model, {name: p.detach().clone() for name, p in model.named_parameters()}


class EMACallback:
    """As trainers' callbacks hold a copy of the model."""

    def __init__(self, model):
        self.average = copy.deepcopy(model)


class AverageMeter:
    """As training loops keep a metric: a number, and one for each class, in the dtype of the model's outputs."""

    def __init__(self, model):
        self.value, self.of_classes = model[0].bias[0].detach(), model[2].bias.detach().clone()


class OfAnother(EMAModel):
    """A class of its own, of a base that is named."""


def _model(dtype=torch.bfloat16):
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.LayerNorm(16), torch.nn.Linear(16, 4)).to(dtype)


AVERAGES = {
    "EMAModel": lambda model: EMAModel(model.parameters()),
    "ModelEmaV3": ModelEmaV3,
    "LitEma": LitEma,
    "ModelEma": ModelEma,
    "EMACallback": EMACallback,
    "OfAnother": lambda model: OfAnother(model.parameters()),
    "AveragedModel": lambda model: AveragedModel(model, avg_fn=get_ema_avg_fn(DECAY)),
}
FINE = {
    "wide": lambda model: ModelEmaV3(model, dtype=torch.float32),
    "rounded stochastically": lambda model: ModelEmaV3(model, stochastic_rounding=True),
    "of another model": lambda model: EMAModel(torch.nn.Conv2d(3, 5, 7).bfloat16().parameters()),
    "halfulp's": hu.optim.EMA,
    "a subclass of halfulp's": type("MyEMA", (hu.optim.EMA,), {}),
    "a meter": AverageMeter,
    "none at all": copy.deepcopy,
}


def _stepped(model, optimizer, steps=1):
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()


def _optimizer(model):
    return hu.optim.AdamW(model.parameters(), lr=1e-3, weight_update="kahan")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", AVERAGES)
def test_an_average_that_was_there_first_is_told_at_the_first_step(kind, dtype):
    model = _model(dtype)
    average = AVERAGES[kind](model)
    optimizer = _optimizer(model)
    with pytest.warns(
        RuntimeWarning, match=rf"{kind} keeps its averages in {dtype}.*halfulp\.optim\.EMA\(model"
    ) as told:
        _stepped(model, optimizer)
    assert len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _stepped(model, optimizer, 4)  # once is enough
    del average


@pytest.mark.parametrize("kind", [kind for kind in AVERAGES if kind != "AveragedModel"])
def test_one_that_came_later_is_told_when_the_steps_have_doubled(kind):
    model = _model()
    optimizer = _optimizer(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _stepped(model, optimizer, 5)
        average = AVERAGES[kind](model)
        _stepped(model, optimizer, 2)
    with pytest.warns(RuntimeWarning, match=f"{kind} keeps its averages"):
        _stepped(model, optimizer)
    del average


@pytest.mark.parametrize("arrive", [copy.deepcopy, lambda average: pickle.loads(pickle.dumps(average))])
def test_one_that_a_copy_or_a_file_brought_is_told(arrive):
    """torch registers no modules then, so that nobody hears of it when it is made."""
    model = _model()
    optimizer = _optimizer(model)
    with pytest.warns(RuntimeWarning, match="AveragedModel keeps"):
        average = AveragedModel(model)
    _engines._fallback_counts.clear()
    average = arrive(average)
    with pytest.warns(RuntimeWarning, match="AveragedModel keeps"):
        _stepped(model, optimizer)
    del average


@pytest.mark.parametrize("kind", FINE)
def test_what_follows_is_not_told(kind):
    model = _model()
    average = FINE[kind](model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _stepped(model, _optimizer(model), 2)
    del average


def test_averages_that_nobody_holds_are_not_told():
    model = _model()
    average = ModelEma(model)
    average.itself = average
    del average
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _stepped(model, _optimizer(model))


def test_a_model_that_is_named_like_an_average_is_none():
    class EMANet(torch.nn.Sequential):
        """A model whose layers take moving averages."""

    model = EMANet(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)).bfloat16()
    model[0].requires_grad_(False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _stepped(model, hu.optim.AdamW([model[1].weight], lr=1e-3))


def test_scaled_models_get_the_advice_that_works_for_them():
    model = hu.scalify(torch.nn.Sequential(torch.nn.Linear(16, 16)))
    average, optimizer = ModelEmaV3(model), hu.optim.AdamW(model.parameters())
    with pytest.warns(RuntimeWarning, match=r"ModelEmaV3 keeps .*take ModelEmaV3\(halfulp\.scaled\.unscalify\(copy"):
        _stepped(model, optimizer)
    del average


def test_objects_are_searched_through_only_where_averages_came_or_went(monkeypatch):
    """A search takes as long as many steps."""
    gc.collect()
    searches = []
    model = _model()
    optimizer = _optimizer(model)
    objects = gc.get_objects
    monkeypatch.setattr(gc, "get_objects", lambda *given: searches.append(1) or objects(*given))
    _stepped(model, optimizer, 70)
    assert len(searches) <= 1
    for _ in range(20):
        _stepped(model, _optimizer(model), 4)
    assert len(searches) <= 1
    average = ModelEmaV3(model, dtype=torch.float32)
    _stepped(model, _optimizer(model), 4)
    assert len(searches) <= 2
    del average


@pytest.mark.parametrize("kind", ["EMAModel", "ModelEmaV3"])
def test_it_is_true_of_them_and_not_of_the_cure(kind):
    model = _model()
    end = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in end.parameters():
            parameter.mul_(1.05).add_(0.01)
    average, cure, start = AVERAGES[kind](model), hu.optim.EMA(model, DECAY), copy.deepcopy(model)
    model.load_state_dict(end.state_dict())
    for _ in range(UPDATES):
        average.step(model.parameters()) if kind == "EMAModel" else average.update(model)
        cure.update()
    narrow = average.shadow_params[0] if kind == "EMAModel" else average.module[0].weight
    way = (end[0].weight - start[0].weight).detach().double()

    def share(mean):
        return float(((mean.detach().double() - start[0].weight.detach().double()) * way).sum() / (way * way).sum())

    assert share(narrow) < 0.5 * (1 - DECAY**UPDATES)
    assert abs(share(cure.float32_state_dict()["0.weight"]) / (1 - DECAY**UPDATES) - 1) < 0.02


@pytest.mark.filterwarnings("ignore")  # theirs, when they are imported
@pytest.mark.parametrize(
    ("module", "kind", "make"),
    [
        ("diffusers.training_utils", "EMAModel", lambda kind, model: kind(model.parameters(), decay=DECAY)),
        ("timm.utils", "ModelEmaV3", lambda kind, model: kind(model, decay=DECAY)),
        ("timm.utils", "ModelEmaV2", lambda kind, model: kind(model, decay=DECAY)),
    ],
)
def test_the_real_ones_are_told(module, kind, make):
    pytest.importorskip(module)
    model = _model(torch.float16)
    average = make(getattr(importlib.import_module(module), kind), model)
    with pytest.warns(RuntimeWarning, match=f"{kind} keeps its averages in torch.float16"):
        _stepped(model, _optimizer(model))
    del average


@pytest.mark.filterwarnings("ignore")  # Lightning's advice
def test_lightnings_average_of_a_module_made_narrow_is_told(tmp_path):
    lightning = pytest.importorskip("lightning.pytorch")
    callbacks = pytest.importorskip("lightning.pytorch.callbacks")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Linear(8, 8).bfloat16()

        def training_step(self, batch, index):
            return self.net(batch[0].bfloat16()).float().square().mean()

        def configure_optimizers(self):
            return hu.optim.AdamW(self.parameters(), lr=1e-3)

    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = lightning.Trainer(
        accelerator="cpu", max_steps=3, callbacks=[callbacks.EMAWeightAveraging()], default_root_dir=tmp_path, **quiet
    )
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(8, 8)))
    with pytest.warns(RuntimeWarning, match=r"AveragedModel keeps its averages in torch\.bfloat16"):
        trainer.fit(Module(), data)
