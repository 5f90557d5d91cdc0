"""check_rule, a test of one's own rules: the same values under other scales must give the same results."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from ..kernels._plain_memory import is_floating
from ..scaled import ScaledTensor

_LARGEST_TRIED_SCALE_EXPONENT = 16


class RuleError(AssertionError):
    """A rule's results depend on scales, or are not the plain operator's."""


def check_rule(
    operator: Callable[..., Any],
    make_arguments: Callable[[], Sequence[Any]],
    *,
    trials: int = 8,
    seed: int | None = None,
    exact: bool | float = True,
    gradients: bool = True,
) -> None:
    """Check that an operator gives on scaled tensors what it gives on plain ones.

    Every floating tensor among the arguments is given as payload x scale twice: a float32 payload under the scale 1,
    and under a random power of two, one for each tensor. The values are the same, so that results and gradients,
    decoded, must have the same bits. They must also be what the plain operator gives. Arguments keep their values, and
    results share no memory with them, but where the plain operator's do.

    Args:
        operator: a function of the arguments: torch.ops.mylib.smooth, torch.erfc, a lambda with options.
        make_arguments: returns the positional arguments, as a sequence; tensors among them may stand in lists. It is
            called once per trial and draws from torch's generator, which is seeded for it and put back after.
        trials: fresh arguments and scales, once or more often.
        seed: of all that is random; None draws one, which an error names.
        exact: True: results equal the plain operator's bit for bit. A number: the largest difference allowed, relative
            to the largest element. Independence of the scales is always bit for bit. Beside the plain operator's the
            sign of a gradient's zero is left open: torch's own formulas for tensor classes differ in it.
        gradients: whether gradients are compared too, where the plain operator has them.

    Raises:
        RuleError: an AssertionError that names the result, the scales under which it differs, and the seed.
        ValueError: no argument is a floating tensor, or a value under which a scale cannot change exactly; no trials,
            or an `exact` that is neither True nor a finite number from 0 on.

    >>> import torch
    >>> from halfulp.scaled import ScaledTensor
    >>> check_rule(torch.mm, lambda: (torch.randn(3, 4), torch.randn(4, 2)), exact=1e-6)
    >>> _ = torch.library.define("halfulp_check::next", "(Tensor x) -> Tensor")
    >>> _ = torch.library.impl("halfulp_check::next", "CPU")(lambda x: x + 1)
    >>> @ScaledTensor.implements(torch.ops.halfulp_check.next.default)
    ... def following(x):
    ...     return ScaledTensor(x.payload + 1, x.scale, x.dtype)  # 1 should be 1 / scale
    >>> check_rule(torch.ops.halfulp_check.next, lambda: (torch.ones(2),), gradients=False)
    Traceback (most recent call last):
    ...
    halfulp.testing._rules.RuleError: halfulp_check.next: result 0 depends on the scales...
    """
    if trials < 1 or exact is False or not 0 <= exact < math.inf:
        raise ValueError(
            f"trials={trials!r}, exact={exact!r}: give 1 or more trials, and True or the difference allowed"
        )
    seed = random.SystemRandom().randrange(2**31) if seed is None else seed
    tolerance = 0.0 if exact is True else float(exact)
    name = str(getattr(operator, "_qualified_op_name", getattr(operator, "__name__", operator))).replace("::", ".")
    with torch.inference_mode(False), torch.enable_grad(), torch.random.fork_rng(devices=[]):
        for number in range(seed, seed + trials):
            torch.manual_seed(number)
            arguments = tuple(make_arguments())
            if not any(is_floating(x) for x in tree_leaves(arguments)):
                raise ValueError("make_arguments returned no floating tensor: there is nothing to give a scale")
            plain, under_one = (
                _run_operator(operator, arguments, number, gradients, exponent) for exponent in (None, lambda: 0)
            )
            _compare_runs(
                plain, under_one, tolerance, f"{name}: {{}} is not the plain operator's: {{}} (seed={number})"
            )
            chance = random.Random(number)
            drawn: list[int] = []

            def draw_exponent(chance: random.Random = chance, drawn: list[int] = drawn) -> int:
                drawn.append(chance.randint(-_LARGEST_TRIED_SCALE_EXPONENT, _LARGEST_TRIED_SCALE_EXPONENT))
                return drawn[-1]

            found = _run_operator(operator, arguments, number, gradients, draw_exponent)
            scales = ", ".join(f"2^{k}" for k in drawn)
            message = f"{name}: {{}} depends on the scales: {{}}; all 1 and {scales} (seed={number})"
            _compare_runs(under_one, found, None, message)


def _run_operator(
    operator: Callable[..., Any],
    arguments: tuple[Any, ...],
    seed: int,
    gradients: bool,
    exponent: Callable[[], int] | None,
) -> dict[str, Any]:
    """Return results, gradients and arguments by name, decoded; plain ones without exponents, else of payloads."""
    leaves: list[Tensor] = []

    def make_autograd_leaf(x: Any) -> Any:
        if not is_floating(x):
            return x
        leaves.append(_convert_to_scaled(x.detach().clone(), exponent))
        return leaves[-1].requires_grad_(gradients)

    arguments = tree_map(make_autograd_leaf, arguments)
    torch.manual_seed(seed)
    results = [x for x in tree_leaves(operator(*arguments)) if x is not None]
    named = {f"result {number}": _decode_scaled(x) for number, x in enumerate(results)}
    outputs = [x for x in results if isinstance(x, Tensor) and x.requires_grad]
    if outputs:
        torch.manual_seed(~seed)  # other numbers than the arguments, which are often drawn alike
        # Numbers of float32, which payloads keep.
        cotangents = [torch.randn(x.shape, dtype=torch.float32, device="cpu").to(x.dtype) for x in outputs]
        cotangents = [
            _convert_to_scaled(c, exponent) if isinstance(x, ScaledTensor) else c for c, x in zip(cotangents, outputs)
        ]
        found = torch.autograd.grad(outputs, leaves, cotangents, allow_unused=True)
        named |= {f"gradient {number}": _decode_scaled(x) for number, x in enumerate(found)}
    named |= {f"argument {number} afterwards": _decode_scaled(x) for number, x in enumerate(leaves)}
    for number, x in enumerate(results):
        memory = _find_memory(x)
        named[f"memory of result {number}"] = {k for k, leaf in enumerate(leaves) if memory == _find_memory(leaf) != 0}
    return named


def _find_memory(x: Any) -> int:
    """Return where the values of a tensor lie; 0 for what has no memory."""
    plain = x.payload if isinstance(x, ScaledTensor) else x
    return plain.untyped_storage().data_ptr() if isinstance(plain, Tensor) else 0


def _convert_to_scaled(x: Tensor, exponent: Callable[[], int] | None) -> Tensor:
    if exponent is None:
        return x
    power = 2.0 ** exponent()
    payload = x.to(torch.float32) / power
    if not torch.equal((payload * power).nan_to_num(), x.to(torch.float32).nan_to_num()):
        raise ValueError(f"an argument does not keep its values under the scale {power:g}: give magnitudes about 1")
    return ScaledTensor(payload, power, x.dtype)


def _decode_scaled(x: Any) -> Any:
    values = x.detach() if isinstance(x, Tensor) else x
    return values.decode() if isinstance(values, ScaledTensor) else values


def _compare_runs(expected: dict[str, Any], found: dict[str, Any], tolerance: float | None, message: str) -> None:
    """Raise where runs differ beyond a tolerance, in any bit if it is None; `message` takes a result's name and how."""
    if expected.keys() != found.keys():
        raise RuleError(message.format("the number of results", f"{list(found)} for {list(expected)}"))
    for name, x in expected.items():
        is_signed = tolerance is None or (tolerance == 0 and not name.startswith("gradient"))
        if difference := _describe_difference(x, found[name], tolerance or 0.0, is_signed):
            raise RuleError(message.format(name, difference))


def _describe_difference(x: Any, y: Any, tolerance: float, is_signed: bool) -> str:
    if isinstance(x, set):
        return f"shared with argument {min(y - x)}" if y - x else ""
    if not isinstance(x, Tensor) or not isinstance(y, Tensor):
        same = x is y or (not isinstance(x, Tensor) and not isinstance(y, Tensor) and (x == y or (x != x and y != y)))
        return "" if same else f"{y!r} for {x!r}"
    if x.shape != y.shape or x.dtype != y.dtype:
        return f"{y.dtype} {list(y.shape)} for {x.dtype} {list(x.shape)}"
    wrong = (x != y) & ~((x != x) & (y != y))
    if is_signed and x.is_floating_point():
        wrong |= (x == y) & (x.signbit() != y.signbit())
    if tolerance and bool(wrong.any()):
        finite = x[x.isfinite()].abs()
        allowed = tolerance * finite.max().item() if finite.numel() else 0.0
        wrong &= ~((x - y).abs() <= allowed)
    if not bool(wrong.any()):
        return ""
    place = tuple(wrong.nonzero()[0].tolist())
    return f"{y[place].item()!r} for {x[place].item()!r} at {list(place)}"
