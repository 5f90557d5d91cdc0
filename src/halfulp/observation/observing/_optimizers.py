"""The optimizers of a run: which of them follows a parameter, and whose step ends a step of the run."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class Optimizers:
    """Puts one optimizer that holds another in order, and counts steps.

    A ZeroRedundancyOptimizer steps this rank's share of the parameters by an optimizer that it holds, and gets the
    others from their ranks: the one inside follows the share, in the arithmetic of its own class, and the one outside
    the rest. Of any other pair the one outside follows all.

    Args:
        given: the optimizers, in any order, with or without those that they hold.
        interval: one step in so many is sampled.

    Attributes:
        all: those to watch.
    """

    def __init__(self, given: Sequence[torch.optim.Optimizer], interval: int) -> None:
        # The lead steps at least once in so many steps of another one, or has no more.
        self._longest = 4 * interval + 20
        shares = {id(one): share for one in given if (share := share_of(one)) is not None}
        inside = {id(share) for share in shares.values()}
        held = {id(part) for one in given for part in vars(one).values() if isinstance(part, torch.optim.Optimizer)}
        self.all: list[torch.optim.Optimizer] = []
        for one in given:
            if id(one) not in held:
                self.all += [one] if id(one) not in shares else [one, shares[id(one)]]
        self._inside = inside
        self._shares = shares
        self._lead: torch.optim.Optimizer | None = None
        self._since: dict[int, int] = {}

    def followed(self, optimizer: torch.optim.Optimizer, names: dict[int, str]) -> dict[int, str]:
        """Return which of the named parameters, by id, an optimizer follows."""
        share = self._shares.get(id(optimizer))
        if share is None:
            return names
        elsewhere = {id(p) for group in share.param_groups for p in group["params"]}
        return {key: name for key, name in names.items() if key not in elsewhere}

    def ends_step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether a step of the run ends with a step that an optimizer has just made.

        The first one that steps leads, whatever the number of optimizers, until another one has made so many steps
        alone that the lead has none left.
        """
        if id(optimizer) in self._inside:
            return False
        if self._lead is None:
            self._lead = optimizer
        alone = self._since[id(optimizer)] = self._since.get(id(optimizer), 0) + 1
        if optimizer is not self._lead and alone <= self._longest:
            return False
        self._lead = optimizer
        self._since.clear()
        return True


def share_of(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer | None:
    """Return the optimizer of this rank's share that a ZeroRedundancyOptimizer holds; None of any other."""
    share = getattr(optimizer, "optim", None)
    named = any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(optimizer).__mro__)
    return share if named and isinstance(share, torch.optim.Optimizer) else None
