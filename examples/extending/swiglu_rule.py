"""A rule of scaled tensors of one's own: SwiGLU, silu(gate) x, is homogeneous of degree 1 in x."""

import torch

from halfulp.scaled.rules import homogeneous

torch.library.define("extending::swiglu", "(Tensor gate, Tensor x) -> Tensor")


def swiglu(gate, x):
    """The operator on plain tensors."""
    return torch.nn.functional.silu(gate) * x


torch.library.impl("extending::swiglu", "CPU")(swiglu)
# x's scale goes into the result's, the gate enters as values.
homogeneous(torch.ops.extending.swiglu.default, x=1, family="gated")
