"""Rules of functions whose results have magnitudes about 1: computed on values, under the scale 1."""

import torch

from ._families import bounded

aten = torch.ops.aten

bounded(
    *(aten.exp.default, aten.tanh.default, aten.sigmoid.default, aten._softmax.default, aten._log_softmax.default),
    *(aten.sin.default, aten.cos.default, aten.log.default),
)
