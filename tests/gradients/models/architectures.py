"""The zoo that gradient exponents are shown on: every registered architecture, and Hugging Face's models."""

import torch

from . import pretrained, sequences, structures, vision
from .cases import ARCHITECTURES, Case
from .pretrained import HF

__all__ = ["ARCHITECTURES", "HF", "Case", "build"]

assert all((pretrained, sequences, structures, vision))  # registered by being imported


def build(name: str, seed: int) -> Case:
    """The same case for the same seed: in train mode, no parameter zero, forward the same at every call.

    A name of `ARCHITECTURES`, or one of `HF` after "hf-".
    """
    torch.manual_seed(seed)
    case = pretrained.make(name.removeprefix("hf-")) if name.startswith("hf-") else ARCHITECTURES[name]()
    with torch.no_grad():
        for parameter in case.model.parameters():
            # A zero would shut the path behind it.
            parameter.copy_(torch.where(parameter == 0, torch.randn_like(parameter) / 10, parameter))
    case.model.train()
    return case
