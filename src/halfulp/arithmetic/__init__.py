"""Exact tools on plain tensors: error-free transforms, expansions, matmul by a wider type or by slicing."""

from .. import _needs_torch as _needs_torch
from ._exact_sums import exact_dot as exact_dot
from ._exact_sums import exact_partial as exact_partial
from ._exact_sums import exact_round as exact_round
from ._exact_sums import exact_sum as exact_sum
from ._linalg import cholesky as cholesky
from ._linalg import det as det
from ._linalg import inverse as inverse
from ._linalg import qr as qr
from ._linalg import solve as solve
from ._matmul import matmul as matmul
from ._pointwise import MAX_COMPONENTS as MAX_COMPONENTS
from ._pointwise import PRECISION_BY_DTYPE as PRECISION_BY_DTYPE
from ._pointwise import Parts as Parts
from ._pointwise import compare as compare
from ._pointwise import merge as merge
from ._pointwise import names as names
from ._pointwise import pointwise as pointwise
from ._pointwise import renormalize as renormalize
from ._pointwise import split as split
from ._reductions import average as average
from ._reductions import product as product
from ._reductions import running_sum as running_sum
from ._reductions import total as total
