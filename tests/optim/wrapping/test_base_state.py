"""Whatever a wrapped optimizer itself saves, a saved run goes on with the bits of one that was not saved."""

import copy
import io

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

import halfulp as hu
from halfulp.kernels import same_bits


class _Counting(torch.optim.Optimizer):
    """A step of lr / number, the number kept somewhere."""

    def __init__(self, params, lr=0.5):
        super().__init__(params, {"lr": lr})
        self.start()

    def start(self):
        pass

    def number(self, group, parameter):
        raise NotImplementedError

    def begin(self, group):
        pass

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            self.begin(group)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad * (group["lr"] / self.number(group, parameter)))


class InGroup(_Counting):
    def begin(self, group):
        group["step"] = group.get("step", 0) + 1

    def number(self, group, parameter):
        return group["step"]


class TensorInGroup(_Counting):
    def begin(self, group):
        group.setdefault("steps", torch.zeros(())).add_(1)

    def number(self, group, parameter):
        return group["steps"].item()


class InNumberOfState(_Counting):
    def number(self, group, parameter):
        self.state[parameter]["n"] = self.state[parameter].get("n", 0) + 1
        return self.state[parameter]["n"]


class InNestedState(_Counting):
    def number(self, group, parameter):
        held = self.state[parameter].setdefault("held", {"parts": [torch.zeros(3)]})
        held["parts"][0].add_(1)
        return held["parts"][0][0].item()


class InOwnStateDict(_Counting):
    """Saves a counter of its own."""

    def start(self):
        self._made = 0

    def state_dict(self):
        return {**super().state_dict(), "made": self._made}


def test_one_that_saves_more_than_states_and_groups_is_refused_where_it_is_wrapped():
    with pytest.raises(
        NotImplementedError, match="InOwnStateDict saves 'made' beside its parameters' states and groups"
    ):
        hu.optim.wrap(InOwnStateDict, _parameters())


class InOwnStateDictOnceThereIsOne(torch.optim.SGD):
    def step(self, closure=None):
        self._made = True
        return super().step(closure)

    def state_dict(self):
        return super().state_dict() | ({"made": True} if hasattr(self, "_made") else {})


def test_one_that_saves_more_after_a_step_is_refused_where_it_is_saved():
    parameters = _parameters()
    optimizer = hu.optim.wrap(InOwnStateDictOnceThereIsOne, parameters)
    optimizer.state_dict()
    _steps(optimizer, parameters, 0, 1)
    with pytest.raises(
        NotImplementedError, match="OnceThereIsOne saves 'made' beside its parameters' states and groups"
    ):
        optimizer.state_dict()


RESUMED = [InGroup, TensorInGroup, InNumberOfState, InNestedState]
OPTIONS = {"SGD": {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}}
# Dense, in any shape, and without a closure: the others have tests of their own.
TORCHS = [
    kind
    for name, kind in sorted(vars(torch.optim).items())
    if isinstance(kind, type) and name not in ("Optimizer", "LBFGS", "SparseAdam", "Muon")
]
UPDATES = ["split", "stochastic"]


def _parameters(start=None):
    if start is not None:
        return [torch.nn.Parameter(parameter.detach().clone()) for parameter in start]
    return [torch.nn.Parameter(torch.linspace(-1, 1, n).reshape(-1, 2).bfloat16()) for n in (6, 10)]


def _steps(optimizer, parameters, first, count):
    for step in range(first, first + count):
        generator = torch.Generator().manual_seed(step)
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator).bfloat16()
        optimizer.step()


def _through_a_file(state_dict):
    buffer = io.BytesIO()
    torch.save(state_dict, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("kind", [*RESUMED, *TORCHS], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("update", UPDATES)
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(kind, update, stepped):
    options = OPTIONS.get(kind.__name__, {})
    parameters = _parameters()
    optimizer = hu.optim.wrap(kind, parameters, weight_update=update, **options)
    _steps(optimizer, parameters, 0, 3)
    saved = _through_a_file(optimizer.state_dict())
    others = _parameters(parameters)
    resumed = hu.optim.wrap(kind, others, weight_update=update, **options)
    if stepped:
        _steps(resumed, others, 50, 2)
        with torch.no_grad():
            for other, parameter in zip(others, parameters):
                other.copy_(parameter)
    resumed.load_state_dict(saved)
    _steps(optimizer, parameters, 3, 3), _steps(resumed, others, 3, 3)
    for one, two in zip(parameters, others):
        assert same_bits(one.detach(), two.detach())


def test_a_file_from_before_the_first_step_starts_anew():
    parameters = _parameters()
    optimizer = hu.optim.wrap(InGroup, parameters, weight_update="split")
    fresh = copy.deepcopy(optimizer.state_dict())
    before = [parameter.detach().clone() for parameter in parameters]
    _steps(optimizer, parameters, 0, 3)
    first = hu.optim.wrap(InGroup, others := _parameters(), weight_update="split")
    _steps(first, others, 7, 1)
    optimizer.load_state_dict(fresh)
    with torch.no_grad():
        for parameter, value in zip(parameters, before):
            parameter.copy_(value)
    _steps(optimizer, parameters, 7, 1)
    for one, two in zip(parameters, others):
        assert same_bits(one.detach(), two.detach())


def test_a_backward_pass_after_a_step_over_float32_parameters_raises_as_in_torch():
    weight = torch.nn.Parameter(torch.full((3,), 2.0))
    loss = (weight * weight).sum()
    optimizer = hu.optim.wrap(torch.optim.RMSprop, [weight], lr=0.1)
    weight.grad = torch.ones(3)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_own_hooks_of_the_wrapped_optimizer_are_refused():
    parameters = _parameters()
    optimizer = hu.optim.wrap(torch.optim.SGD, parameters, lr=0.1)
    optimizer.base.register_step_pre_hook(lambda *_: None)
    with pytest.raises(NotImplementedError, match="register them on the one that wrap returned"):
        _steps(optimizer, parameters, 0, 1)


def test_copies_are_refused():
    with pytest.raises(NotImplementedError, match=r"load state_dict\(\) into that"):
        copy.deepcopy(hu.optim.wrap(torch.optim.SGD, _parameters(), lr=0.1))


def test_states_of_parameters_that_left_a_group_wait_for_them():
    parameters, stayed = _parameters(), _parameters()
    optimizer = hu.optim.wrap(torch.optim.SGD, parameters, lr=0.1, momentum=0.9)
    twin = hu.optim.wrap(torch.optim.SGD, stayed, lr=0.1, momentum=0.9)
    _steps(optimizer, parameters, 0, 2)
    _steps(twin, stayed, 0, 2)
    left = optimizer.param_groups[0]["params"].pop(0)
    with pytest.raises(ValueError, match=r"a parameter of shape \(3, 2\), which is in no group"):
        optimizer.state_dict()
    optimizer.param_groups[0]["params"].insert(0, left)
    _steps(optimizer, parameters, 2, 3)
    _steps(twin, stayed, 2, 3)
    assert all(same_bits(one, other) for one, other in zip(parameters, stayed, strict=True))


class _ReadsItsGroups(torch.optim.SGD):
    """Notes which groups it steps, and what they hold of their own."""

    def step(self, closure=None):
        self.defaults["seen"] = [(len(group["params"]), group.get("bonus")) for group in self.param_groups]
        return super().step(closure)


def test_what_a_group_holds_goes_with_it_when_groups_change_places():
    parameters = _parameters()
    first = {"params": [("first", parameters[0])], "bonus": 5}
    rest = [{"params": [(f"#{k}", parameter)]} for k, parameter in enumerate(parameters[1:])]
    optimizer = hu.optim.wrap(_ReadsItsGroups, [first, *rest], lr=0.1)
    _steps(optimizer, parameters, 0, 1)
    expected = [(1, 5), *((1, None) for _ in rest)]
    assert optimizer.base.defaults["seen"] == expected
    optimizer.param_groups.reverse()
    _steps(optimizer, parameters, 1, 1)
    assert optimizer.base.defaults["seen"] == expected[::-1]
    del optimizer.param_groups[-1]
    _steps(optimizer, parameters, 2, 1)
    assert optimizer.base.defaults["seen"] == expected[:0:-1]
    assert not any("bonus" in group for group in optimizer.param_groups)


def test_parameters_may_be_regrouped_between_steps():
    parameters = _parameters()
    optimizer = hu.optim.wrap(torch.optim.SGD, parameters, lr=0.1, momentum=0.9)
    _steps(optimizer, parameters, 0, 1)
    momenta = [
        optimizer.base.state[optimizer._shadow_by_parameter[one]]["momentum_buffer"].clone() for one in parameters
    ]
    before = [parameter.detach().clone() for parameter in parameters]
    optimizer.param_groups.clear()
    optimizer.add_param_group({"params": parameters[:1], "lr": 0.0, "momentum": 1.0})
    optimizer.add_param_group({"params": parameters[1:], "momentum": 1.0})
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    stayed = [same_bits(one, other.detach()) for one, other in zip(before, parameters, strict=True)]
    assert stayed == [True, *[False] * (len(parameters) - 1)]
    for parameter, momentum in zip(parameters, momenta, strict=True):
        assert same_bits(optimizer.base.state[optimizer._shadow_by_parameter[parameter]]["momentum_buffer"], momentum)


class _WritesSeed(torch.optim.SGD):
    def step(self, closure=None):
        self.param_groups[0]["seed"] = 3
        return super().step(closure)


def test_a_class_that_writes_an_option_of_wrap_into_its_groups_is_refused():
    parameters = _parameters()
    with pytest.raises(ValueError, match=r"_WritesSeed writes \['seed'\] into its groups"):
        _steps(hu.optim.wrap(_WritesSeed, parameters, lr=0.1), parameters, 0, 1)


def test_groups_may_all_be_replaced_between_steps():
    parameters = _parameters()
    optimizer = hu.optim.wrap(torch.optim.SGD, parameters, lr=0.1)
    optimizer.param_groups.clear()
    optimizer.step()
    optimizer.add_param_group({"params": parameters})
    before = [parameter.detach().clone() for parameter in parameters]
    _steps(optimizer, parameters, 0, 1)
    assert not any(same_bits(one, other) for one, other in zip(parameters, before, strict=True))


def test_a_run_goes_back_to_a_file_from_before_the_first_step():
    parameters = _parameters()
    optimizer = hu.optim.wrap(torch.optim.SGD, parameters, lr=0.1, momentum=0.9)
    fresh = copy.deepcopy(optimizer.state_dict())
    _steps(optimizer, parameters, 0, 2)
    optimizer.load_state_dict(fresh)
    assert not optimizer.base.state


class _AddsToGroups(torch.optim.SGD):
    def add_param_group(self, param_group):
        super().add_param_group({**param_group, "bonus": 7})


def test_the_wrapped_optimizer_itself_takes_groups_that_come_later():
    first, *rest = parameters = _parameters()
    optimizer = hu.optim.wrap(_AddsToGroups, [first], lr=0.1)
    optimizer.add_param_group({"params": rest, "lr": 0.5})
    _steps(optimizer, parameters, 0, 1)
    assert [(group["bonus"], group["lr"]) for group in optimizer.base.param_groups] == [(7, 0.1), (7, 0.5)]


def test_hooks_of_every_optimizer_see_one_step_also_where_a_class_calls_its_parents():
    torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)  # by which torch hooks the parent's step
    optimizer = hu.optim.wrap(_ReadsItsGroups, parameters := _parameters(), lr=0.1)
    seen = []
    handle = register_optimizer_step_post_hook(lambda stepped, *_: seen.append(stepped))
    try:
        _steps(optimizer, parameters, 0, 1)
    finally:
        handle.remove()
    assert seen == [optimizer]


class _Anchored(torch.optim.Optimizer):
    """A step towards the weights that the optimizer was made with, which it reads as it takes a group."""

    def __init__(self, params, lr=0.25):
        super().__init__(params, {"lr": lr})

    def add_param_group(self, param_group):
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            self.state[parameter]["anchor"] = parameter.detach().clone()

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    back = parameter - self.state[parameter]["anchor"]
                    parameter.sub_(parameter.grad + back, alpha=group["lr"])


WRITES = {"in place": lambda x: x.mul_(2.0), "foreach": lambda x: torch._foreach_mul_([x], 2.0)}
WRITES |= {"data": lambda x: x.data.mul_(2.0)}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_class_that_writes_the_weights_as_it_takes_them_is_refused(dtype, write):
    class Writing(torch.optim.SGD):
        writes = True

        @torch.no_grad()
        def add_param_group(self, param_group):
            super().add_param_group(param_group)
            for parameter in param_group["params"] if self.writes else ():
                WRITES[write](parameter)

    first, second = (torch.nn.Parameter(torch.ones(3, dtype=dtype)) for _ in range(2))
    refused = pytest.raises(NotImplementedError, match="writes the weights as it takes them")
    with refused:
        hu.optim.wrap(Writing, [first], lr=0.1)
    Writing.writes = False
    optimizer = hu.optim.wrap(Writing, [first], lr=0.1)
    Writing.writes = True
    optimizer.add_param_group({"params": [second]})
    first.grad = torch.ones(3, dtype=dtype)
    for _ in range(2):
        with refused:
            optimizer.step()
    for weight in (first, second):
        assert torch.equal(weight, torch.ones(3, dtype=dtype))


def test_float32_parameters_are_wrapped_in_inference_mode():
    weight = torch.nn.Parameter(torch.ones(3))
    with torch.inference_mode():
        optimizer = hu.optim.wrap(torch.optim.SGD, [weight], lr=0.5)
    weight.grad = torch.ones(3)
    optimizer.step()
    assert torch.equal(weight, torch.full((3,), 0.5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("narrow", [{}, {"param_dtype": torch.bfloat16, "weight_update": "split"}], ids=["kept", "cut"])
def test_a_class_may_read_the_weights_as_it_takes_their_group(dtype, narrow, seed):
    first, second = (torch.nn.Parameter(torch.randn(6).to(dtype)) for _ in range(2))
    theirs = [torch.nn.Parameter(p.detach().float().clone()) for p in (first, second)]
    wanted, made = _Anchored(theirs[:1]), hu.optim.wrap(_Anchored, [first], **narrow)
    wanted.add_param_group({"params": theirs[1:]})
    made.add_param_group({"params": [second]})
    assert not any(shadow.untyped_storage().nbytes() > 4 for shadow in made.base.param_groups[0]["params"])
    for _ in range(5):
        for a, b in zip(theirs, (first, second)):
            b.grad = torch.randn(6).to(b.dtype)
            a.grad = b.grad.float()
        wanted.step()
        made.step()
    shown = made.float32_state_dict(torch.nn.ParameterList([first, second])).values()
    exact = dtype == torch.float32 or narrow
    for a, b in zip(theirs, shown):
        assert torch.equal(a, b) if exact else torch.allclose(a, b, atol=0.02)
