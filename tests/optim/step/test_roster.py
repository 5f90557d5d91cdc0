"""A step that takes over the roster of the last one does what a step that plans everything anew does."""

import contextlib
import copy
import pickle

import pytest
import torch

import halfulp as hu
from halfulp.kernels import same_bits
from halfulp.optim.step import _batch
from halfulp.optim.step._batch import CachedBatchTables

COUNT = 4


def _parameters():
    return [torch.nn.Parameter(torch.linspace(0.1, 0.9, 3 * (2 + k)).bfloat16().view(3, -1)) for k in range(COUNT)]


class Run:
    """One training: parameters, their optimizer, and what its steps said."""

    def __init__(self, **options):
        self.parameters = _parameters()
        given = {"lr": 1e-2, "weight_update": "split8", "report_interval": 3, **options}
        halves = self.parameters[:2], self.parameters[2:]
        self.optimizer = hu.optim.AdamW([{"params": list(half)} for half in halves], **given)

    def group(self, number=0):
        return self.optimizer.param_groups[number]

    def state(self, place=0):
        return self.optimizer.state[self.parameters[place]]

    def step(self, number, prepare=lambda run: None):
        for place, parameter in enumerate(self.parameters):
            wave = torch.linspace(-1 - number, 1 + place, parameter.numel()).view(parameter.shape)
            parameter.grad = wave.to(parameter.dtype)
        prepare(self)
        try:
            self.optimizer.step()
        except (ValueError, TypeError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def numbers(self):
        found = [parameter.detach() for parameter in self.parameters]
        for state in self.optimizer.state.values():
            found += [value if isinstance(value, torch.Tensor) else torch.tensor(value) for value in state.values()]
        return found


def _data(change):
    def apply(run):
        run.parameters[1].data = change(run.parameters[1].data)

    return apply


def _write(run):
    with torch.no_grad():
        run.parameters[1].clamp_(-0.2, 0.2)


def _views(run):
    """Make two parameters parts of one tensor, which share a version counter."""
    whole = torch.cat([parameter.detach().flatten() for parameter in run.parameters[:2]])
    for parameter, part in zip(run.parameters, whole.split([parameter.numel() for parameter in run.parameters[:2]])):
        with torch.no_grad():
            parameter.set_(part.view(parameter.shape))


def _resize(run):
    run.parameters[1].data = torch.ones(3, 7, dtype=torch.bfloat16)


def _state(change):
    return lambda run: change(run.state(1))


def _swap_states(run):
    state, (one, two) = run.optimizer.state, run.parameters[:2]
    state[one]["exp_avg"], state[one]["exp_avg_sq"] = state[one]["exp_avg_sq"], state[one]["exp_avg"]
    state[one], state[two] = dict(state[one]), state[two]


def _reload(run):
    saved = copy.deepcopy(run.optimizer.state_dict())
    for state in saved["state"].values():
        state["exp_avg"].mul_(2)
    run.optimizer.load_state_dict(saved)


def _copy(how):
    def apply(run):
        run.parameters, run.optimizer = how((run.parameters, run.optimizer))

    return apply


def _append(run):
    run.parameters.append(torch.nn.Parameter(torch.ones(3, 4, dtype=torch.bfloat16)))
    run.optimizer.add_param_group({"params": [run.parameters[-1]], "lr": 0.1})


def _move(run):
    run.group(1)["params"].insert(0, run.group(0)["params"].pop())
    run.group(1)["lr"] = 0.05


def _replace(run):
    run.group()["params"][1] = run.parameters[1] = torch.nn.Parameter(torch.ones(3, 3, dtype=torch.bfloat16))


def _option(name, value):
    return lambda run: run.group().update({name: value})


BETWEEN = {
    "nothing": lambda run: None,
    "data": _data(torch.clone),
    "data of another shape": _resize,
    "data transposed": _data(lambda x: x.t().contiguous().t()),
    "data of another dtype": _data(torch.Tensor.float),
    "the same memory transposed": _data(torch.t),
    "the same memory as float16": _data(lambda x: x.view(torch.float16)),
    "data and state freed": lambda run: run.state(1).pop("exp_avg"),
    "set_": _views,
    "written": _write,
    "requires no gradient": lambda run: run.parameters[1].requires_grad_(False),
    "lr": _option("lr", 0.5),
    "lr as a tensor": _option("lr", torch.tensor(0.5)),
    "infinite lr": _option("lr", float("inf")),
    "weight_update": _option("weight_update", "kahan"),
    "state_dtype": _option("state_dtype", torch.float32),
    "seed": _option("seed", 7),
    "report_interval": _option("report_interval", 1),
    "amsgrad": _option("amsgrad", True),
    "added group": _append,
    "moved to another group": _move,
    "replaced": _replace,
    "reversed": lambda run: run.group()["params"].reverse(),
    "state data": _state(lambda state: setattr(state["exp_avg"], "data", state["exp_avg"].clone().mul_(2))),
    "state set_": _state(lambda state: state["exp_avg"].set_(state["exp_avg_sq"].clone())),
    "state replaced": _state(lambda state: state.update(exp_avg=state["exp_avg"].clone().mul_(3))),
    "state of another dtype": _state(lambda state: state.update(exp_avg=state["exp_avg"].double())),
    "step number": _state(lambda state: state.update(step=9)),
    "states swapped": _swap_states,
    "state entry copied": lambda run: run.optimizer.state.update({run.parameters[1]: dict(run.state(1))}),
    "state emptied": lambda run: run.optimizer.state.clear(),
    "loaded": _reload,
    "deepcopy": _copy(copy.deepcopy),
    "pickle": _copy(lambda both: pickle.loads(pickle.dumps(both))),
    "plans cleared": lambda run: run.optimizer._plans.invalidate_all(),
}


def _gradient(make, place=1):
    def apply(run):
        run.parameters[place].grad = make(run.parameters[place].grad)

    return apply


class _Marked(torch.Tensor):
    pass


def _negative(x):
    return torch._neg_view(-x)


def _under(dtype, view):
    """Give the gradient while the parameter has another dtype: torch lets only equal ones be assigned."""

    def apply(run):
        parameter = run.parameters[1]
        own, given = parameter.data, parameter.grad
        parameter.grad = None
        parameter.data = own.to(dtype)
        parameter.grad = given.to(dtype)
        parameter.data = view(own)

    return apply


GRADIENTS = {
    "none": _gradient(lambda x: None),
    "all none": lambda run: run.optimizer.zero_grad(),
    "with gaps": _gradient(lambda x: torch.stack([x, x], -1)[..., 0]),
    "expanded": _gradient(lambda x: x[:1, :1].expand(x.shape)),
    "sparse": _gradient(torch.Tensor.to_sparse),
    "negative bit": _gradient(_negative),
    "zeros not written out": _gradient(lambda x: torch._efficientzerotensor(x.shape, dtype=x.dtype)),
    "a subclass": _gradient(lambda x: x.as_subclass(_Marked)),
    "of the shape before": lambda run: setattr(run.parameters[1], "data", run.parameters[1].data.view(-1)),
    "an MCTensor": _gradient(lambda x: hu.MCTensor.encode(x, components=2, dtype=x.dtype)),
    "float32": _under(torch.float32, lambda x: x),
    "bfloat16 beside float16": _under(torch.bfloat16, lambda x: x.view(torch.float16)),
}


def _is_anew(run):
    run.optimizer._plans.batch_tables = None


@pytest.mark.sampled(1)
@pytest.mark.parametrize("engine", ["auto", "reference"])
@pytest.mark.parametrize("change", BETWEEN)
def test_a_change_between_two_steps_is_followed(change, engine):
    kept, anew = Run(), Run()
    with hu.kernels.engine(engine):
        for number in range(7):
            if number == 3:
                BETWEEN[change](kept), BETWEEN[change](anew)
            said = kept.step(number), anew.step(number, _is_anew)
            assert said[0] == said[1]
    assert all(map(same_bits, kept.numbers(), anew.numbers()))
    assert str(kept.optimizer.report()) == str(anew.optimizer.report())


@pytest.mark.parametrize("kind", GRADIENTS)
def test_any_gradient_is_taken_or_refused(kind):
    kept, anew = Run(), Run()
    for number in range(7):
        give = GRADIENTS[kind] if number in (3, 4) else lambda run: None
        said = kept.step(number, give), anew.step(number, lambda run, give=give: (give(run), _is_anew(run)))
        assert said[0] == said[1]
    assert all(map(same_bits, kept.numbers(), anew.numbers()))


def test_a_gradient_of_another_shape_is_refused_whatever_stood():
    run = Run()
    run.step(0), run.step(1)
    parameter = run.parameters[1]
    before = parameter.detach().clone()

    def turn(run):
        parameter.data, given = parameter.data.view(-1), parameter.grad.view(-1)
        parameter.grad = given
        parameter.data = parameter.data.view(before.shape)

    assert "has shape" in run.step(2, turn)
    assert same_bits(parameter.detach(), before)


@pytest.mark.filterwarnings("ignore:parameters are written between steps")
def test_a_write_to_what_shares_a_counter_is_no_write(seed):
    """Of two parts of one tensor each step moves the other's counter; a clamp of one resets that one alone."""
    kept, anew = Run(), Run()
    for number in range(6):
        if number == 1:
            _views(kept), _views(anew)
        if number == 3:
            _write(kept), _write(anew)
        kept.step(number), anew.step(number, _is_anew)
    assert all(map(same_bits, kept.numbers(), anew.numbers()))


def test_steps_that_repeat_take_the_roster_over(monkeypatch):
    run, made = Run(), []
    build = CachedBatchTables.__init__
    monkeypatch.setattr(CachedBatchTables, "__init__", lambda self, *given: made.append(1) or build(self, *given))
    for number in range(8):  # metered ones among them
        run.step(number)
    assert made == [1]


MODES = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "inference": torch.inference_mode,
    "no gradients": torch.no_grad,
}


@pytest.mark.parametrize("mode", MODES)
def test_steps_under_a_mode_and_behind_it_take_the_roster_over(mode, monkeypatch):
    kept, anew, made = Run(), Run(), []
    build = CachedBatchTables.__init__
    monkeypatch.setattr(CachedBatchTables, "__init__", lambda self, *given: made.append(1) or build(self, *given))
    for number in range(9):
        with MODES[mode]() if number % 4 < 2 else contextlib.nullcontext():
            kept.step(number)
            anew.step(number, _is_anew)
    assert len(made) <= 9 + 5
    assert all(map(same_bits, kept.numbers(), anew.numbers()))


def test_gradients_that_require_gradients_take_the_roster_over(monkeypatch):
    run, made = Run(), []
    build = CachedBatchTables.__init__
    monkeypatch.setattr(CachedBatchTables, "__init__", lambda self, *given: made.append(1) or build(self, *given))
    for number in range(4):
        run.step(number, lambda run: [parameter.grad.requires_grad_() for parameter in run.parameters])
    assert made == [1]


def test_without_native_checks_every_step_plans_anew(monkeypatch):
    """In a torch without TensorGuards."""
    fast, plain, made = Run(), Run(), []
    build = CachedBatchTables.__init__
    for number in range(5):
        fast.step(number)
    monkeypatch.setattr(_batch, "TensorGuards", None)
    monkeypatch.setattr(CachedBatchTables, "__init__", lambda self, *given: made.append(1) or build(self, *given))
    for number in range(5):
        assert not plain.step(number)
    assert len(made) == 5
    assert all(map(same_bits, fast.numbers(), plain.numbers()))


def test_parameters_of_other_ages_are_metered_by_their_own_steps():
    """Whose interval ends at other steps are counted apart, whatever the roster's batches were."""
    kept, anew = Run(), Run()
    for number in range(9):
        if number == 1:
            _append(kept), _append(anew)
        kept.step(number), anew.step(number, _is_anew)
        samples = [[row.samples for row in run.optimizer.report().rows] for run in (kept, anew)]
        assert samples[0] == samples[1]
    assert all(map(same_bits, kept.numbers(), anew.numbers()))


@pytest.mark.filterwarnings("ignore:parameters are written between steps")
@pytest.mark.parametrize("update", ["split8", "kahan", "split"])
def test_writes_some_steps_apart_are_followed(update):
    kept, anew = (Run(weight_update=update, lr=1e-3) for _ in range(2))
    for number in range(12):
        for run in (kept, anew):
            if number in (2, 5, 7, 10):
                with torch.no_grad():
                    run.parameters[1][0].mul_(0.5)
        kept.step(number), anew.step(number, _is_anew)
        assert all(map(same_bits, kept.numbers(), anew.numbers())), number


@pytest.mark.filterwarnings("ignore:parameters are written between steps")
def test_writes_to_scaled_parameters_are_followed_under_any_scale(seed):
    def training():
        torch.manual_seed(0)
        parameter = torch.nn.Parameter(hu.ScaledTensor.encode(torch.randn(3, 5) * 1e-3, torch.float16))
        return parameter, hu.optim.AdamW([parameter], lr=0.5, weight_update="kahan")

    (kept, one), (anew, two) = training(), training()
    for number in range(12):
        for parameter in (kept, anew):
            parameter.grad = hu.ScaledTensor.encode(torch.linspace(-1, 2 + number, 15).view(3, 5), torch.float16)
            if number in (4, 6, 9):
                with torch.no_grad():
                    parameter[0].mul_(0.5)
        two._plans.batch_tables = None
        one.step(), two.step()
        states = one.state[kept], two.state[anew]
        assert same_bits(kept.detach().decode(), anew.detach().decode()), number
        for name, value in states[0].items():
            assert not isinstance(value, torch.Tensor) or same_bits(value, states[1][name]), (number, name)


def _rest(run, place):
    run.parameters[place].grad = None
