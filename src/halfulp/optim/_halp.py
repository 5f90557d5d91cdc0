"""HALP: stochastic variance-reduced gradient steps on a narrow offset from a wide center."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from .._messages import name_type, quote
from ..rounding import mix64, random_words
from ._group_options import OptimizerParams, refuse_non_iterable_params
from .parameters._narrow_groups import walk_group_parameters

# Of every group, the same in all.
_KEYS_EQUAL_IN_ALL_GROUPS = ("steps", "norm")


class HALP(torch.optim.Optimizer):
    """High-accuracy low-precision training: SVRG whose iterate is an offset of a few bits from a center.

    De Sa et al., arXiv 1803.03383, algorithm 2. With the center c, the full gradient g there and an offset z, a step is

        z <- Q(z - lr (grad f_i(c + z) - grad f_i(c) + g)),   Q(x) = d clamp(floor(x / d + u), -2^(b-1), 2^(b-1) - 1)

    with u uniform in [0, 1), and the spacing d = |g| / (mu (2^(b-1) - 1)) of the grid chosen anew at each center ("bit
    centering"): as g shrinks, so does the grid, and `bits` bits reach the accuracy of the center's dtype. Strong
    convexity mu guarantees that the minimum is inside: |w - w*| <= |g| / mu. Offsets are stored as integers; a
    parameter holds c + z, which forward and backward read.

    Each epoch is one `center` and then steps; a step calls its closure twice, at c + z and at c, with the same random
    numbers of torch's CPU generator. The closure must compute the same function both times: batch normalization in
    evaluation mode, no other data.

    Args:
        params: float32 or float64 parameters, or param groups.
        lr: of plain gradient steps.
        bits: of an offset, 2 to 16; None for full-precision SVRG, the control.
        mu: strong convexity, which sets the grid's range, |g| / mu. Too small makes a grid that is coarser than the
            steps, too large clips the offsets. None chooses each tensor's range: 1.5 times as far as its offset went
            in the epoch before, changed by at most fourfold, and half of that while the gradient grows.
        bit_centering: False keeps the first center's grid for ever (LP-SVRG), the other control.
        seed: of the random bits, which depend on (seed, step, position of the parameter, element).

    Raises:
        TypeError: parameters that are not float32 or float64, or a step without a closure.
        ValueError: a number out of range.
        RuntimeError: a step before the first center.

    >>> import torch, halfulp as hu
    >>> w = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    >>> targets = torch.tensor([[0.5, 3.0], [1.5, 1.0]], dtype=torch.float64)
    >>> opt = hu.optim.HALP([w], lr=0.1, bits=8)
    >>> for epoch in range(30):
    ...     _ = opt.center(lambda: (w - targets).square().sum(1).mean().backward())
    ...     for step in range(40):
    ...         target = targets[step % 2]
    ...         _ = opt.step(lambda: (w - target).square().sum().backward())
    >>> bool((w - targets.mean(0)).abs().max() < 1e-9)
    True
    """

    def __init__(
        self,
        params: OptimizerParams,
        lr: float = 1e-3,
        *,
        bits: int | None = 8,
        mu: float | None = None,
        bit_centering: bool = True,
        seed: int = 0,
    ) -> None:
        refuse_non_iterable_params(params)
        options = {"lr": lr, "bits": bits, "mu": mu, "bit_centering": bit_centering, "seed": seed}
        # Beside the options, the number of steps and the norm of the last full gradient, which is that of all groups.
        super().__init__(params, {**options, "steps": 0, "norm": math.nan})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as torch.optim does; options out of range are refused and leave the groups as they were."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        group.update({name: self.param_groups[0][name] for name in _KEYS_EQUAL_IN_ALL_GROUPS})
        try:
            _check_group_options(group)
        except Exception:
            self.param_groups.pop()
            raise

    def center(self, closure: Callable[[], Any]) -> Any:
        """Make the present weights the center, and their full gradient the one that steps are corrected by.

        Args:
            closure: computes the loss over all data and its gradients (`backward`, several are summed); their weights
                among each other must be those of a step's batches. Gradients are set to None before.

        Returns:
            What the closure returns.

        Raises:
            ValueError: a gradient that is not finite, or a learning rate of 0 by which mu is to be chosen; the center
                stays where it was.
        """
        for group in self.param_groups:
            is_first = any("mu" not in self.state[parameter] for parameter in group["params"])
            if is_first and group["bits"] is not None and group["mu"] is None and not 0 < group["lr"] < math.inf:
                raise ValueError(
                    f"the first center of HALP(mu=None) chooses mu by the learning rate, which is {group['lr']!r}: "
                    "call center() where the schedule is above 0, or give mu="
                )
        result, gradients = self._compute_gradients(closure)
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradients.values()))
        if not math.isfinite(norm):
            raise ValueError("the full gradient is not finite, so no center can be there: take a smaller lr or mu")
        for group, _, parameter in walk_group_parameters(self):
            state = self.state[parameter]
            if parameter not in gradients:
                state.clear()  # frozen until the next center
                continue
            if group["bits"] is not None and ("spacing" not in state or group["bit_centering"]):
                mu = group["mu"] or _choose_mu_by_last_offsets(state, group, norm)
                state |= {"mu": mu, "spacing": norm / (mu * (2 ** (group["bits"] - 1) - 1)), "farthest": 0}
            state |= {"center": parameter.detach().clone(), "gradient": gradients[parameter]}
            if group["bits"] is not None:
                state["offset"] = torch.zeros_like(parameter, dtype=torch.int8 if group["bits"] <= 8 else torch.int16)
        for group in self.param_groups:
            group["norm"] = norm
        return result

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step by a batch's gradients at the weights and at the center.

        Args:
            closure: computes the loss of one batch and its gradients; it is called twice.

        Returns:
            What the first call, at the weights, returned.
        """
        if closure is None:
            raise TypeError("HALP.step takes a closure that computes the loss and calls backward: it is called twice")
        if not any("center" in state for state in self.state.values()):
            raise RuntimeError("HALP has no center yet: call opt.center(closure over all data) before the first step")
        for group in self.param_groups:
            if not math.isfinite(group["lr"]):
                raise ValueError(f"HALP steps by a finite lr, got lr={group['lr']!r}: mend the schedule that wrote it")
        before = torch.get_rng_state()
        result, here = self._compute_gradients(closure)
        weights = {p: p.detach().clone() for p, state in self.state.items() if "center" in state}
        try:
            torch.set_rng_state(before)
            self._write_parameters({parameter: self.state[parameter]["center"] for parameter in weights})
            _, at_center = self._compute_gradients(closure)
        finally:
            self._write_parameters(weights)
        if not all(bool(g.isfinite().all()) for made in (here, at_center) for g in made.values()):
            raise ValueError("a gradient of this step is not finite: weights and offsets stay; take a smaller lr")
        moved = {}
        for position, (group, _, parameter) in enumerate(walk_group_parameters(self)):
            if parameter in weights and parameter in here and parameter in at_center:
                gradient = here[parameter] - at_center[parameter] + self.state[parameter]["gradient"]
                moved[parameter] = self._move_offset_and_compute_weight(group, parameter, gradient, position)
        self._write_parameters(moved)
        for group in self.param_groups:
            group["steps"] += 1
        return result

    def _move_offset_and_compute_weight(
        self, group: dict[str, Any], parameter: torch.Tensor, gradient: torch.Tensor, position: int
    ) -> torch.Tensor:
        """Move one parameter's offset by the equation, and return the weight that it stands for."""
        state = self.state[parameter]
        if group["bits"] is None:
            moved: torch.Tensor = parameter.detach() - group["lr"] * gradient
            return moved
        if state["spacing"] == 0:  # the center is a minimum, and its grid a point
            return parameter.detach()
        spacing, most = state["spacing"], 2 ** (group["bits"] - 1) - 1
        key = mix64(mix64(group["seed"], group["steps"]), position)
        index = torch.arange(parameter.numel(), dtype=torch.int64, device=parameter.device).view(parameter.shape)
        uniform = random_words(key, index).double() / 2**32
        wanted = (state["offset"].double() - group["lr"] * gradient.double() / spacing + uniform).floor()
        codes = wanted.clamp(-most - 1, most)
        state["farthest"] = max(state["farthest"], int(codes.abs().max()) if codes.numel() else 0)
        # From a file they have the parameter's dtype.
        state["offset"] = codes.to(torch.int8 if group["bits"] <= 8 else torch.int16)
        stands_for: torch.Tensor = (state["center"].double() + codes * spacing).to(parameter.dtype)
        return stands_for

    def _compute_gradients(self, closure: Callable[[], Any]) -> tuple[Any, dict[torch.Tensor, torch.Tensor]]:
        """Call a closure, and return its result and the gradients that it made."""
        self.zero_grad(set_to_none=True)
        with torch.enable_grad():
            result = closure()
        made = {p: p.grad.detach().clone() for _, _, p in walk_group_parameters(self) if p.grad is not None}
        if not made:
            raise ValueError("the closure made no gradient of these parameters: call backward() on the loss in it")
        return result, made

    @torch.no_grad()
    def _write_parameters(self, values: dict[torch.Tensor, torch.Tensor]) -> None:
        for parameter, value in values.items():
            parameter.copy_(value)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy, a pickle or a file; raises ValueError for the state of another optimizer."""
        for group in state.get("param_groups", ()):
            if lacking := [name for name in _KEYS_EQUAL_IN_ALL_GROUPS if name not in group]:
                raise ValueError(f"this is no state dict of hu.optim.HALP: a group of it has no {quote(lacking)}")
        super().__setstate__(state)


def _choose_mu_by_last_offsets(state: dict[str, Any], group: dict[str, Any], norm: float) -> float:
    """Return the mu whose range is 1.5 times as far as the offset went since the last center."""
    if "mu" not in state:
        return 1.0 / (32.0 * float(group["lr"]))  # of 32 steps
    most: int = 2 ** (int(group["bits"]) - 1) - 1
    grown = 2.0 if norm > group["norm"] else 1.0
    mu: float = state["mu"]
    change: float = grown * most / (1.5 * max(1, int(state["farthest"])))
    return mu * min(max(change, 0.25), 4.0)


def _check_group_options(group: dict[str, Any]) -> None:
    for name, value in (("lr", group["lr"]), ("mu", group["mu"])):
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
        if not is_number and not (name == "mu" and value is None):
            raise ValueError(f"HALP({name}={value!r}): a finite number above 0" + (", or None" if name == "mu" else ""))
    bits = group["bits"]
    if bits is not None and (not isinstance(bits, int) or not 2 <= bits <= 16):
        raise ValueError(f"HALP(bits={bits!r}): 2 to 16, or None for SVRG in full precision")
    for parameter in group["params"]:
        if type(parameter) not in (torch.nn.Parameter, torch.Tensor):
            raise TypeError(f"HALP takes plain parameters, got {name_type(parameter)}")
        if parameter.dtype not in (torch.float32, torch.float64):
            raise TypeError(
                f"HALP takes float32 or float64 parameters, got {parameter.dtype}: the center is wide, and what is "
                "narrow is the offset (bits=)"
            )
