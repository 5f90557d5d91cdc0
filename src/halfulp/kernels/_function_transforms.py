"""Detection of torch.func transforms and forward-mode differentiation, which operators do not support."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad


def under_transform() -> bool:
    """Return whether a torch.func transform or a level of forward-mode differentiation is active.

    Not while a compiler traces, which knows the transforms itself.

    There an operator's registered backward rule is no rule: grad refuses it and jvp takes its derivative for 0. An
    autograd.Function with a jvp serves all of them, at a cost that a plain call need not pay.
    """
    if torch.compiler.is_compiling():
        return False
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0
