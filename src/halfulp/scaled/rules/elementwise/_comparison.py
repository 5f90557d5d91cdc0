"""Rules of comparisons and tests: of values, with plain truth values as results."""

from ....kernels import torch_operators
from .._vocabulary import decoded, overloads

aten = torch_operators("aten")

decoded(
    *overloads(aten.eq, aten.ne, aten.lt, aten.le, aten.gt, aten.ge, aten.equal, aten.isin, aten.allclose),
    *overloads(aten.isnan, aten.isinf, aten.isposinf, aten.isneginf, aten.signbit, aten.nonzero, aten.nonzero_static),
    *overloads(aten.logical_not, aten.logical_and, aten.logical_or, aten.logical_xor, aten.hash_tensor),
    family="comparison",
)
