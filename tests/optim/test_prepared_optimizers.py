"""Optimizers that a trainer has prepared: whatever takes an optimizer of hu.optim takes its wrapper too."""

import pytest
import torch

import halfulp as hu
from halfulp.optim._optimizer import unwrap_optimizer


class Accelerated(torch.optim.Optimizer):
    """As accelerate wraps an optimizer: one itself, which hides the other's class and its methods."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    param_groups = property(lambda self: self.optimizer.param_groups)
    state = property(lambda self: self.optimizer.state)
    defaults = property(lambda self: self.optimizer.defaults)


class Imitating:
    """As Fabric and Lightning wrap an optimizer: of a subclass of its class, and without its attributes."""

    def __init__(self, optimizer):
        self._optimizer = optimizer
        self.__class__ = type("Fabric" + type(optimizer).__name__, (type(self), type(optimizer)), {})

    optimizer = property(lambda self: self._optimizer)

    def __getattr__(self, name):
        return getattr(self._optimizer, name)


class Plain:
    """Any other object round an optimizer."""

    def __init__(self, optimizer):
        self.optimizer = optimizer


def _by_accelerate(optimizer):
    return pytest.importorskip("accelerate").Accelerator(cpu=True).prepare(optimizer)


def _by_fabric(optimizer):
    fabric = pytest.importorskip("lightning.fabric")
    return fabric.Fabric(accelerator="cpu", devices=1).setup_optimizers(optimizer)


def _by_lightning(optimizer):
    pytest.importorskip("lightning.pytorch")
    from lightning.pytorch.core.optimizer import LightningOptimizer

    return LightningOptimizer(optimizer)


WRAPPERS = {
    "accelerate's shape": Accelerated,
    "Lightning's shape": Imitating,
    "plain": Plain,
    "nested": lambda optimizer: Accelerated(Imitating(optimizer)),
    "accelerate": _by_accelerate,
    "Fabric": _by_fabric,
    "Lightning": _by_lightning,
}


def _trained(prepare):
    """A small model of bfloat16 weights after three steps, its optimizer, and that as a trainer hands it over."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2)).bfloat16()
    optimizer = hu.optim.AdamW(model.named_parameters(), lr=1e-3, weight_update="kahan", report_interval=1)
    prepared = prepare(optimizer)
    for _ in range(3):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    return model, optimizer, prepared


def _averaged(model, optimizer):
    average = hu.optim.EMA(model, 0.5, optimizer=optimizer)
    average.update()
    return {name: value.tolist() for name, value in average.float32_state_dict().items()}


def _observed(model, optimizer):
    with hu.observe(model, optimizer, interval=1) as seen:
        unwrap_optimizer(optimizer).step()
    return len(seen), sorted(seen.record.parameters), {one.optimizer for one in seen.record.parameters.values()}


def _forecast(model, optimizer):
    return str(hu.forecast(model, optimizer, steps=10))


# Whatever takes an optimizer of ours: the function, and how it is asked.
TAKES = {
    "EMA": _averaged,
    "report": lambda model, optimizer: hu.optim.report(optimizer),
    "contract": lambda model, optimizer: hu.contract(model, [optimizer]).check(model, optimizer),
    "observe": _observed,
    "forecast": _forecast,
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", TAKES)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_prepared_optimizer_is_taken_as_the_one_inside(wrapper, kind):
    model, optimizer, prepared = _trained(WRAPPERS[wrapper])
    if wrapper != "plain":
        assert isinstance(prepared, torch.optim.Optimizer)
    other, own, _ = _trained(lambda optimizer: optimizer)
    assert unwrap_optimizer(prepared) is optimizer
    assert TAKES[kind](model, prepared) == TAKES[kind](other, own)


def test_an_optimizer_with_another_inside_is_itself():
    """Lookahead and such share the groups, and do more than the one that they hold."""
    _, optimizer, _ = _trained(Plain)

    class Lookahead(torch.optim.Optimizer):
        def __init__(self, optimizer):
            self.optimizer, self.param_groups = optimizer, optimizer.param_groups

    outer = Lookahead(optimizer)
    assert unwrap_optimizer(outer) is outer
    assert unwrap_optimizer(Accelerated) is Accelerated


def test_what_is_not_ours_is_refused_by_name():
    model, _, _ = _trained(Plain)
    theirs = Accelerated(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(TypeError, match=r"report takes an optimizer of hu\.optim, got an SGD: hu.observe shows"):
        hu.optim.report(theirs)
    with pytest.raises(TypeError, match=r"optimizer= takes an optimizer of hu\.optim, got an SGD: leave it out"):
        hu.optim.EMA(model, optimizer=theirs)
    with pytest.raises(TypeError, match="wrap takes an optimizer's class and parameters, got an Accelerated"):
        hu.optim.wrap(theirs, model.parameters())


def test_an_average_of_a_prepared_optimizer_follows_the_float32_weights():
    model, optimizer, prepared = _trained(Accelerated)
    assert _averaged(model, prepared) == _averaged(model, optimizer) != _averaged(model, None)
