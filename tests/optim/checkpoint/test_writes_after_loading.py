"""Companions that have come from a file or a copy belong to one payload: whoever has written another, they go."""

import copy
import pickle

import pytest
import torch

import halfulp as hu

from ...laws.optim.cases import UPDATES, narrow_updates


def _optimizer(model, update, wrapped):
    options = {"lr": 1e-2, "weight_update": UPDATES[update], "param_dtype": torch.bfloat16}
    if not wrapped:
        return hu.optim.AdamW(model.named_parameters(), **options)
    model.bfloat16()
    del options["param_dtype"]
    return hu.optim.wrap(torch.optim.AdamW, model.named_parameters(), **options)


def _step(model, optimizer):
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape).bfloat16()
    with hu.kernels.engine("reference"):
        optimizer.step()


def _stepped(update, wrapped, steps=3):
    model = torch.nn.Linear(8, 8)
    optimizer = _optimizer(model, update, wrapped)
    for _ in range(steps):
        _step(model, optimizer)
    return model, optimizer


def _resumed(model_first, steps):
    def come(model, optimizer, update, wrapped):
        pair = _stepped(update, wrapped, steps)
        files = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        order = list(zip(pair, files))
        for target, file in order if model_first else reversed(order):
            target.load_state_dict(file)
        return pair

    return come


def _buffer_copies(model, optimizer, update, wrapped):
    return copy.deepcopy((model, optimizer))


def _unpickled(model, optimizer, update, wrapped):
    return pickle.loads(pickle.dumps((model, optimizer)))


WRAPPED = ("split", "kahan", "components-3", "nearest")
OPTIMIZERS = [*((update, False) for update in narrow_updates()), *((update, True) for update in WRAPPED)]
COMES = {
    "load, model first": _resumed(True, 0),
    "load, optimizer first": _resumed(False, 0),
    "load over other steps, model first": _resumed(True, 1),
    "load over other steps, optimizer first": _resumed(False, 1),
    "deepcopy": _buffer_copies,
    "pickle": _unpickled,
}
WRITES = {
    "mul_": lambda weight: weight.mul_(1.5),
    "a fill of one row": lambda weight: weight[0].fill_(0.75),
    "data.copy_": lambda weight: weight.data.copy_(torch.randn_like(weight)),
    "data =": lambda weight: setattr(weight, "data", torch.randn_like(weight)),
    "initialised again": torch.nn.init.normal_,
}


def _read(model, optimizer):
    return optimizer.float32_state_dict(model)["weight"].clone()


def _shown(model):
    return model.weight.detach().float()


def _is_what_the_next_step_starts_from(value, model, optimizer):
    for group in optimizer.param_groups:
        group["lr"] = group["weight_decay"] = 0.0
    _step(model, optimizer)
    return torch.equal(_read(model, optimizer), value)


COPIES = ("deepcopy", "pickle")
# A wrapped optimizer is not copied.
each_way = pytest.mark.parametrize(
    ("optimizer", "come"),
    [(one, come) for one in OPTIMIZERS for come in COMES if not (one[1] and come in COPIES)],
    ids=lambda one: one if isinstance(one, str) else one[0] + " wrapped" * one[1],
)


@pytest.mark.sampled(2)
@each_way
def test_what_is_loaded_or_copied_is_the_same_weight_until_it_is_written(seed, optimizer, come):
    source = _stepped(*optimizer)
    before = _read(*source)
    pair = COMES[come](*source, *optimizer)
    assert torch.equal(_read(*pair), before)
    if not UPDATES[optimizer[0]].feeds_back:
        assert _is_what_the_next_step_starts_from(before, *pair)
    assert torch.equal(_read(*source), before)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("write", WRITES)
@each_way
def test_a_write_before_the_first_step_is_the_whole_weight(seed, optimizer, come, write):
    pair = COMES[come](*_stepped(*optimizer), *optimizer)
    with torch.no_grad():
        WRITES[write](pair[0].weight)
    written = _shown(pair[0]).clone()
    assert torch.equal(_read(*pair), written)
    if not UPDATES[optimizer[0]].feeds_back:
        assert _is_what_the_next_step_starts_from(written, *pair)


@pytest.mark.sampled(2)
@each_way
def test_what_is_saved_or_copied_after_a_write_is_what_was_written(seed, optimizer, come):
    source = _stepped(*optimizer)
    with torch.no_grad():
        source[0].weight.mul_(1.5)
    written = _shown(source[0]).clone()
    assert torch.equal(_read(*COMES[come](*source, *optimizer)), written)


def test_an_average_in_the_models_place_is_saved_without_the_low_bits_of_the_weights(seed):
    model, optimizer = _stepped("split", False)
    ema = hu.optim.EMA(model, 0.5)
    _step(model, optimizer)
    before = _read(model, optimizer)
    with ema.apply():
        shown, files = _shown(model).clone(), copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    assert torch.equal(_read(model, optimizer), before)
    other, other_optimizer = _stepped("split", False, 0)
    other.load_state_dict(files[0])
    other_optimizer.load_state_dict(files[1])
    assert torch.equal(_read(other, other_optimizer), shown)
    other.load_state_dict(model.state_dict())
    assert torch.equal(_read(other, other_optimizer), _shown(model)), "low bits of an average beside weights"


def test_a_file_without_checksums_is_taken_at_its_word(seed):
    model, optimizer = _stepped("split", False)
    before, files = _read(model, optimizer), copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    for state in files[1]["state"].values():
        del state["payload_checksums"]
    other, other_optimizer = _stepped("split", False, 0)
    other_optimizer.load_state_dict(files[1])
    other.load_state_dict(files[0])
    assert torch.equal(_read(other, other_optimizer), before)


def test_a_scale_belongs_to_what_the_low_bits_go_with(seed):
    model = torch.nn.Linear(8, 8, bias=False)
    model = hu.scalify(model, dtype=torch.float16)
    optimizer = hu.optim.SGD(model.named_parameters(), lr=1e-3, weight_update="kahan")
    model.weight.grad = torch.randn(8, 8)
    with hu.kernels.engine("reference"):
        optimizer.step()
    before = optimizer.float32_state_dict(model)["weight"]
    other, other_optimizer = copy.deepcopy((model, optimizer))
    assert torch.equal(other_optimizer.float32_state_dict(other)["weight"], before)
    other, other_optimizer = copy.deepcopy((model, optimizer))
    with torch.no_grad():
        other.weight.mul_(2.0)  # the scale alone changes
    written = other.weight.detach().decode(torch.float32)
    assert torch.equal(other_optimizer.float32_state_dict(other)["weight"], written)


def test_a_parameter_of_another_dtype_does_not_stop_saving(seed):
    model, optimizer = _stepped("split", False)
    for dtype in (torch.float32, torch.float64):
        model.to(dtype)
        assert optimizer.state_dict()["state"]
        copy.deepcopy(optimizer)
