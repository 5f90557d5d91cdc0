"""train() and eval() of a wrapped optimizer with two weights switch the narrow parameters too."""

import torch

import halfulp as hu
from halfulp.kernels import same_bits


class TwoWeights(torch.optim.Optimizer):
    """Gradient steps on z; the parameter is an average of z and x in training, x in evaluation, as in schedule-free."""

    def __init__(self, params, lr=0.1, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta, "train_mode": True, "count": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            assert group["train_mode"]
            group["count"] += 1
            for p in group["params"]:
                z = self.state[p].setdefault("z", p.clone())
                z.sub_(p.grad, alpha=group["lr"])
                p.lerp_(z, 1 / group["count"])

    @torch.no_grad()
    def eval(self):
        self._move(False, lambda beta: 1 - 1 / beta)

    @torch.no_grad()
    def train(self):
        self._move(True, lambda beta: 1 - beta)

    def _move(self, mode, weight):
        for group in self.param_groups:
            if group["train_mode"] != mode:
                group["train_mode"] = mode
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(self.state[p]["z"], weight(group["beta"]))


def _run(parameter, optimizer, read):
    shown = []
    for step in range(6):
        optimizer.train()
        parameter.grad = ((torch.arange(parameter.numel()) - 8) * (step + 1) / 64).to(parameter.dtype)
        optimizer.step()
        if step % 2:
            optimizer.eval()
            optimizer.eval()
            shown.append(read())
    return shown


def test_split_weights_are_the_float32_runs():
    start = torch.linspace(0.5, 1.5, 16).bfloat16()
    wide, narrow = torch.nn.Parameter(start.float()), torch.nn.Parameter(start.clone())
    theirs = TwoWeights([wide], lr=0.01)
    ours = hu.optim.wrap(TwoWeights, [("w", narrow)], lr=0.01, weight_update="split")
    module = torch.nn.Module()
    module.w = narrow
    expected = _run(wide, theirs, lambda: wide.detach().clone())
    found = _run(narrow, ours, lambda: ours.float32_state_dict(module)["w"])
    assert all(same_bits(one, other) for one, other in zip(expected, found, strict=True))
    assert not same_bits(expected[0], expected[-1])


def test_other_optimizers_have_the_methods_and_stay():
    for make in (hu.AdamW, lambda p: hu.optim.wrap(torch.optim.AdamW, p)):
        parameter = torch.nn.Parameter(torch.ones(4).bfloat16())
        optimizer = make([parameter])
        optimizer.eval()
        optimizer.train()
        assert parameter.tolist() == [1] * 4
        assert not optimizer.state_dict()["state"]


def test_parameters_frozen_after_steps_are_switched_with_the_others():
    start = torch.linspace(0.5, 1.5, 16).bfloat16()
    wide, narrow = (
        [torch.nn.Parameter(start.to(d, copy=True)) for _ in range(2)] for d in (torch.float32, start.dtype)
    )
    theirs, ours = TwoWeights(wide, lr=0.01), hu.optim.wrap(TwoWeights, narrow, lr=0.01, weight_update="split")
    for parameters, optimizer in ((wide, theirs), (narrow, ours)):
        for step in range(3):
            for k, parameter in enumerate(parameters):
                parameter.grad = ((torch.arange(16) - 8) * (step + k + 1) / 64).to(parameter.dtype)
            optimizer.step()
        parameters[0].requires_grad_(False)
        optimizer.eval()
    module = torch.nn.ParameterList(narrow)
    assert all(map(same_bits, (p.detach() for p in wide), ours.float32_state_dict(module).values()))
