"""One forward and backward pass of a copy of a model, with all its results, to compare with another."""

from __future__ import annotations

import contextlib
import copy
import math
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from .._messages import name_type
from ..kernels import same_bits
from ..kernels._plain_memory import is_floating
from ..scaled import ScaledTensor

# Two results agree if their bits do or, behind a sum in another order, their leading 20 bits.
SUM_ORDER_TOLERANCE = 1e-6
# An element may be off by this many times what float32 itself is off by among elements of its size.
_FLOAT32_ERROR_FACTOR = 32.0
# Elements up to this many binades larger count as of its size.
_BINADES_SHARING_FLOAT32_ERROR = 6
# Beyond float32's binades, for 0.
_BINADE_STANDING_FOR_ZERO = -1100


def is_close_to_float32(wanted: Tensor | None, got: Tensor | None, exact: Tensor | None) -> bool:
    """Return whether a result is plain float32's up to the order of sums, element by element.

    The error against float64 must be within 1e-6 of the norm, or within 32 times plain float32's own. That says nothing
    of elements far below the largest, so each one's error must be within 1e-6 of its value, or within 32 times the
    largest that plain float32 makes among elements of up to 64 times its size. Without `exact`, the result in float64,
    the norm of the difference must be within 1e-6 of the norm, and elements may not become 0, nor cease to be.

    >>> a = torch.tensor([1.0, 1e-7]).repeat(8)
    >>> [is_close_to_float32(a, b, a.double()) for b in (a * (1 + 1e-7), torch.where(a < 1e-6, 0.0, a))]
    [True, False]
    """
    off = measure_result_difference(wanted, got)
    if wanted is None or got is None or not 0 < off < math.inf:
        return off == 0
    finite = wanted.isfinite().flatten()
    wanted, got = (x.double().flatten()[finite] for x in (wanted, got))
    if exact is None or exact.numel() != finite.numel():
        return off <= SUM_ORDER_TOLERANCE and not bool(((wanted == 0) != (got == 0)).any())
    exact = exact.double().flatten()[finite]
    if (got - exact).norm() > max(SUM_ORDER_TOLERANCE * exact.norm(), _FLOAT32_ERROR_FACTOR * (wanted - exact).norm()):
        return False
    binades = (
        torch.where(exact == 0, _BINADE_STANDING_FOR_ZERO, torch.frexp(exact).exponent.long())
        - _BINADE_STANDING_FOR_ZERO
    )
    largest = torch.zeros(
        int(binades.max()) + 1 + _BINADES_SHARING_FLOAT32_ERROR, dtype=torch.float64, device=exact.device
    )
    largest.scatter_reduce_(0, binades, (wanted - exact).abs(), "amax")
    own_errors = torch.cummax(largest, 0).values[binades + _BINADES_SHARING_FLOAT32_ERROR]
    allowed = torch.maximum(SUM_ORDER_TOLERANCE * exact.abs(), _FLOAT32_ERROR_FACTOR * own_errors)
    return bool(((got - exact).abs() <= allowed).all())


def compute_relative_difference(wanted: Tensor, got: Tensor) -> float:
    """Return the norm of the difference over the norm of what was wanted; infinite where infinities or NaN differ.

    >>> inf = float("inf")
    >>> pairs = (([4.0, inf], [3.0, inf]), ([inf], [-inf]))
    >>> [compute_relative_difference(torch.tensor(wanted), torch.tensor(got)) for wanted, got in pairs]
    [0.25, inf]
    """
    finite = wanted.isfinite() & got.isfinite()
    if not bool((finite | (wanted == got) | (wanted.isnan() & got.isnan())).all()):
        return math.inf
    wanted, got = wanted.double(), got.double()
    norm = torch.where(finite, wanted, 0.0).norm().clamp(min=torch.finfo(torch.float64).tiny)
    return float(torch.where(finite, wanted - got, 0.0).norm() / norm)


# Every run begins with these random bits.
_FIXED_STEP_SEED = 0


def copy_model(model: nn.Module) -> nn.Module:
    """Return a deep copy; hooks of parameters and buffers, which `copy.deepcopy` drops, are refused."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor._post_accumulate_grad_hooks or tensor._backward_hooks:
            raise ValueError(
                f"{name!r} has a hook on its gradient, which a copy has not, and the proof runs on copies: remove it "
                "for the proof (handle.remove()), and register it again afterwards"
            )
    try:
        return copy.deepcopy(model)
    except (RuntimeError, TypeError, copy.Error) as error:
        raise ValueError(
            f"the model cannot be copied, and the proof runs on copies: set activations that it keeps to None ({error})"
        ) from error


@contextlib.contextmanager
def use_fixed_random_state() -> Iterator[None]:
    """Run a block from the same state of Python's, NumPy's and torch's generators; restore them."""
    python_state, numpy_state = random.getstate(), numpy.random.get_state()
    with torch.random.fork_rng():
        try:
            torch.manual_seed(_FIXED_STEP_SEED)
            random.seed(_FIXED_STEP_SEED)
            numpy.random.seed(_FIXED_STEP_SEED)
            yield
        finally:
            random.setstate(python_state)
            numpy.random.set_state(numpy_state)


@contextlib.contextmanager
def forbid_model_changes(model: nn.Module) -> Iterator[None]:
    """Check that runs of copies do not change the model, whose gradients are put aside meanwhile."""
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    before = {name: (tensor.grad, tensor._version) for name, tensor in tensors.items()}
    for tensor in tensors.values():
        tensor.grad = None
    reached = []
    try:
        yield
    finally:
        for name, tensor in tensors.items():
            grad, version = before[name]
            if tensor.grad is not None or tensor._version != version:
                reached.append(name)
            tensor.grad = grad
    if reached:
        raise ValueError(
            f"running a copy of the model reached the model's own {reached[0]!r}: a function that the model keeps "
            "refers to the model, so that its copies are no copies; make it a method or a module"
        )


# A payload that stands for more may saturate under another scale, or overflow; models take such numbers for "no value".
_LARGEST_COMPARED_MAGNITUDE = 2.0**96

LossOfOutput = Callable[[Any], Tensor]
# The decoded results of one step of a model, by what they are called in a report: "the loss", "output 0",
# "buffer 'mean'", "gradient 'weight'", which is None where there is none.
StepResults = dict[str, Tensor | None]
GRADIENT_RESULT_PREFIX = "gradient "

# A run in float64 that is farther from float32's than this drew other random numbers, or computed
# something else.
_SAME_COMPUTATION_TOLERANCE = 1e-2


def select_gradient_results(results: StepResults) -> StepResults:
    """Return the gradients of a run, by what they are called."""
    return {name: value for name, value in results.items() if name.startswith(GRADIENT_RESULT_PREFIX)}


def run_float32_step(model: nn.Module, batch: Any, loss_of: LossOfOutput) -> StepResults:
    """Run a step of a copy in plain float32, which must be finite, and the same when it is run again."""
    run = run_one_step(copy_model(model), batch, loss_of)
    loss, gradients = run["the loss"], select_gradient_results(run)
    assert loss is not None
    if not bool(loss.isfinite().all()):
        raise ValueError(f"in plain float32 the loss is {loss.item()}: nothing to compare with; give another batch")
    if all(grad is None for grad in gradients.values()):
        raise ValueError("in plain float32 no parameter has a gradient: give a loss that depends on one that trains")
    for name, grad in gradients.items():
        if grad is not None and not bool(grad.isfinite().all()):
            of = name.removeprefix(GRADIENT_RESULT_PREFIX)
            raise ValueError(
                f"in plain float32 the gradient of {of} is not finite: nothing to compare with; give another batch"
            )
    again = run_one_step(copy_model(model), batch, loss_of)
    for name, first, second in pair_results_by_name(run, again):
        if measure_result_difference(first, second):
            raise ValueError(
                f"two runs of the plain model differ in {name}: it keeps a state that a copy does not (a closure's, a "
                "global one, a random generator of its own), and nothing can be proved; make that state a buffer or an "
                "attribute of a module"
            )
    return run


def run_float64_step(
    model: nn.Module, batch: Any, loss_of: LossOfOutput, plain: StepResults, step: int = 1
) -> StepResults | None:
    """Run the step in float64, to estimate float32's own error; None where it raises or draws other random numbers."""
    try:
        other = copy_model(model).double()
        for _ in range(step):
            given = tree_map(lambda x: x.double() if is_floating(x) else x, batch)
            found = run_one_step(other, given, loss_of)
        if any(
            getattr(a, "shape", None) != getattr(b, "shape", None) for _, a, b in pair_results_by_name(plain, found)
        ):
            return None
        # Of a gradient that is 0 but for rounding float32 has no digit: all gradients are taken together.
        for names in (["the loss"], [*select_gradient_results(plain)]):
            ours, theirs = (
                torch.cat([x.double().flatten() for name in names if (x := run.get(name)) is not None])
                for run in (plain, found)
            )
            if not compute_relative_difference(ours, theirs) < _SAME_COMPUTATION_TOLERANCE:
                return None
    except Exception:  # whatever a model of somebody else's raises in another dtype
        return None
    return found


def run_one_step(
    model: nn.Module,
    batch: Any,
    loss_of: LossOfOutput,
    scaled: Callable[[Tensor], Tensor] = lambda loss: loss,
    watch: contextlib.AbstractContextManager | None = None,
) -> StepResults:
    """Run a model on a batch, and backward from what ``scaled`` makes of the loss, under ``watch``."""
    model.zero_grad()
    with use_fixed_random_state(), watch or contextlib.nullcontext():
        output = call_model_on_batch(model, batch)
        loss = loss_of(output)
        check_loss(loss)
        if loss.requires_grad:
            scaled(loss).backward()
    values: StepResults = {"the loss": loss, **list_named_outputs(output)}
    values |= {f"buffer {name!r}": x for name, x in model.named_buffers() if is_floating(x)}
    values |= list_named_gradients(model)
    return {name: None if x is None else copy_decoded_values(x) for name, x in values.items()}


def check_loss(loss: Any) -> None:
    """Refuse a loss that is no scalar."""
    if not isinstance(loss, Tensor):
        raise TypeError(f"the loss gave {name_type(loss)}: give a scalar tensor, loss=lambda output: ...")
    if loss.numel() != 1:
        raise ValueError(f"the loss has shape {list(loss.shape)}: give a scalar, loss=lambda output: ...")


def list_named_outputs(output: Any) -> dict[str, Tensor]:
    """Return the floating tensors among a model's outputs, by what they are called."""
    leaves = tree_leaves(dict(output) if isinstance(output, Mapping) else output)
    return {f"output {index}": x for index, x in enumerate(leaves) if is_floating(x)}


def list_named_gradients(model: nn.Module) -> StepResults:
    """Return the gradients of the parameters that train, by what they are called."""
    return {f"{GRADIENT_RESULT_PREFIX}{name!r}": p.grad for name, p in model.named_parameters() if p.requires_grad}


def pair_results_by_name(wanted: StepResults, got: StepResults) -> list[tuple[str, Tensor | None, Tensor | None]]:
    """Return the names of two runs' results, and both of each."""
    return [(name, wanted.get(name), got.get(name)) for name in {**wanted, **got}]


def copy_decoded_values(x: Tensor) -> Tensor:
    """Return a copy of the values, decoded."""
    x = x.detach()
    return x.decode(torch.float32) if isinstance(x, ScaledTensor) else x.clone()


def call_model_on_batch(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


def make_loss_function(given: LossOfOutput | None, seed: int) -> LossOfOutput:
    """Return the given loss; without one the output's own loss, or its elements under fixed random weights."""
    if given is not None and not callable(given):
        raise TypeError(f"the loss is {name_type(given)}: give a function, loss=lambda output: ...")
    if given is not None:
        return given

    def loss_of(output: Any) -> Tensor:
        own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        if own is not None:
            return own
        generator = torch.Generator().manual_seed(seed)
        floats = [x for x in list_named_outputs(output).values() if x.requires_grad]
        if not floats:
            raise ValueError("no floating output depends on the parameters: give loss=lambda output: ...")
        weights = (torch.randn(x.shape, dtype=torch.float32, device="cpu", generator=generator) for x in floats)
        first, *others = ((x * weight.to(x.device)).sum() for x, weight in zip(floats, weights))
        return sum(others, first)

    return loss_of


def measure_result_difference(wanted: Tensor | None, got: Tensor | None) -> float:
    """Return the relative norm of the difference, 0 where the bits are the same, infinite where one is missing."""
    if wanted is None or got is None or wanted.shape != got.shape:
        return 0.0 if wanted is got else math.inf
    return 0.0 if same_bits(wanted, got) else compute_relative_difference(wanted, got)


# Of an operator whose results are not torch's: its name, the module or direction it ran in, and by how much.
OperatorDifference = tuple[str, str, float]


class OperatorCheckMode(TorchDispatchMode):
    """Runs torch's operator on the decoded operands beside each operator of scaled tensors.

    On the same operands, what a wrong operator does to those behind it is not held against them. Views are passed over.

    Attributes:
        first_difference: the first operator whose bits differ, if any.
        wrong_operators: those that differ by more than another order of sums explains, in order.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.first_difference: OperatorDifference | None = None
        self.wrong_operators: list[OperatorDifference] = []
        self._module_paths = paths = ["the model"]
        self._handles = []
        for name, module in model.named_modules():
            enter = module.register_forward_pre_hook(lambda *_, path=name or "the model": paths.append(path))
            leave = module.register_forward_hook(lambda *_: paths.__delitem__(-1), always_call=True)
            self._handles += [enter, leave]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for handle in self._handles:
            handle.remove()

    def __torch_dispatch__(self, operator: Any, types: Any, arguments: tuple = (), options: dict | None = None) -> Any:
        options = options or {}
        given = tree_leaves((arguments, options))
        scaled = any(isinstance(x, ScaledTensor) for x in given)
        if not scaled or operator.is_view or operator.namespace != "aten" or "empty" in operator.name():
            return operator(*arguments, **options)
        # Decoded before the call, which may write into its operands.
        narrow, wide = (
            tree_map(lambda x, to=to: _decode_to_dtype(x, to), (arguments, options))
            for to in (torch.float32, torch.float64)
        )
        generator = options.get("generator") or torch.random.default_generator
        before = generator.get_state()
        results = operator(*arguments, **options)
        after = generator.get_state()

        def run_plain_operator(operands: tuple) -> list[Tensor]:
            """Return the floating results of torch's own operator, of the same random bits; none where it raises."""
            generator.set_state(before)
            try:
                return _list_floating_results(operator(*operands[0], **operands[1]))
            except (RuntimeError, TypeError, NotImplementedError):
                return []
            finally:
                generator.set_state(after)

        wanted, got = run_plain_operator(narrow), _list_floating_results(results)
        # Where torch takes no such operands, the results count by what they lead to.
        if [x.shape for x in wanted] == [x.shape for x in got]:
            wanted, got = (
                list(map(_clamp_where_both_are_huge, wanted, got)),
                list(map(_clamp_where_both_are_huge, got, wanted)),
            )
            if not all(map(same_bits, wanted, got)):
                self._record_difference(operator, wanted, got, run_plain_operator(wide))
        return results

    def _record_difference(self, operator: Any, wanted: list[Tensor], got: list[Tensor], exact: list[Tensor]) -> None:
        place = "the backward pass" if torch._C._current_graph_task_id() != -1 else self._module_paths[-1]
        found = str(operator), place, max(map(compute_relative_difference, wanted, got))
        self.first_difference = self.first_difference or found
        best: list[Tensor | None] = [None] * len(wanted)
        if len(exact) == len(wanted):
            best[:] = map(_clamp_where_both_are_huge, exact, wanted)
        if not all(map(is_close_to_float32, wanted, got, best)):
            self.wrong_operators.append(found)


def _clamp_where_both_are_huge(x: Tensor, other: Tensor) -> Tensor:
    """Return x, clamped to 2^96 where both are beyond: numbers there count as equal if their signs are."""
    if x.shape != other.shape:
        return x
    are_huge = (x.abs() >= _LARGEST_COMPARED_MAGNITUDE) & (other.abs() >= _LARGEST_COMPARED_MAGNITUDE)
    return torch.where(are_huge, x.clamp(-_LARGEST_COMPARED_MAGNITUDE, _LARGEST_COMPARED_MAGNITUDE), x)


def _decode_to_dtype(x: Any, dtype: torch.dtype) -> Any:
    """Return a copy of the values in another dtype, with the strides of the tensor."""
    if not isinstance(x, Tensor):
        return x
    values = copy_decoded_values(x)
    return values.to(dtype) if values.dtype == torch.float32 else values


def _list_floating_results(results: Any) -> list[Tensor]:
    floats = [x for x in tree_leaves(results) if isinstance(x, Tensor) and x.is_floating_point()]
    return [_decode_to_dtype(x, torch.float32) for x in floats]
