"""Optimizer states rounded to the values of a format, to emulate a processor that has no other."""

import torch

from ..rounding import Nearest, Rounding, Stochastic, quantize

# A second moment changes by less than half an ulp per step, so that nearest rounding would freeze it.
_SECOND_MOMENTS = ("exp_avg_sq", "max_exp_avg_sq")


def hold_states(optimizer: torch.optim.Optimizer, format: str, seed: int) -> None:
    """Round the float32 states to ``format`` after every step: to nearest, second moments stochastically."""
    steps = 0

    def after_step(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        nonlocal steps
        steps += 1
        for position, state in enumerate(optimizer.state.values()):
            for name, value in state.items():
                if name != "step" and torch.is_tensor(value) and value.dtype == torch.float32:
                    rounding, counter = _rounding(name, seed, position, steps)
                    quantize(value, format, rounding, out=value, counter=counter)

    optimizer.register_step_post_hook(after_step)


def _rounding(name: str, seed: int, position: int, steps: int) -> tuple[Rounding, int]:
    if name in _SECOND_MOMENTS:
        return Stochastic(seed=seed + position), steps
    return Nearest(), 0
