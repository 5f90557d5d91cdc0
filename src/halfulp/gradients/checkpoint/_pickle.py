"""Pickling and copying a scaler: with its models, whose copies the copy belongs to."""

from __future__ import annotations

from typing import Any

from torch import nn


def reduced(scaler: Any, base: type) -> tuple:
    """The result of ``__reduce__``: how to make the scaler again, and its state.

    Args:
        scaler: an AdaptiveGradScaler, or an instance of a subclass.
        base: AdaptiveGradScaler itself, whose ``__init__`` takes models and options.

    Raises:
        ValueError: it is in the middle of an iteration.
    """
    if scaler._enabled and (scaler._per_optimizer_states or scaler._controller.backward.passes):
        raise ValueError(
            "a scaler is pickled or copied before scaler.scale(loss).backward() or after scaler.update(), as a "
            "torch.amp.GradScaler is: in between, gradients wait at its scale"
        )
    models = [one() for one in scaler._models]
    # What is left of a scaler whose model is gone is its state.
    models = [nn.Identity()] if None in models else models
    own = {name: value for name, value in vars(scaler).items() if name not in scaler._own}
    state = {"state": scaler.state_dict(), "last_step": scaler.last_step, "device": scaler._device, "own": own}
    return restored, (base, type(scaler), models, {**scaler._options, "enabled": scaler._enabled}), state


def restored(base: type[Any], kind: type[object], models: list[nn.Module], options: dict[str, Any]) -> Any:
    """A scaler of those models, with those options, of a kind which is ``base`` or a subclass of it.

    Raises:
        ValueError: a model is not there yet, as it holds the scaler.
    """
    if not all("_modules" in vars(model) for model in models):
        raise ValueError(
            "the scaler's model holds the scaler, so that neither can be copied before the other: keep the scaler "
            "beside the model, and copy both at once, copy.deepcopy((model, scaler))"
        )
    scaler = kind.__new__(kind)
    # A subclass may be made in another way: what it has of its own comes with the state.
    base.__init__(scaler, models, **options)
    return scaler


def resume(scaler: Any, state: dict[str, Any]) -> None:
    """Restore the state of a scaler that `restored` made."""
    vars(scaler).update(state["own"])
    scaler.last_step, scaler._device = state["last_step"], state["device"]
    if scaler._enabled:
        scaler._take(state["state"])
