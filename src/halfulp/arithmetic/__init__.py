"""Exact tools on plain tensors: error-free transforms, expansions, matmul by a wider type or by slicing."""

from ._exact_sum import exact_dot as exact_dot
from ._exact_sum import exact_partial as exact_partial
from ._exact_sum import exact_round as exact_round
from ._exact_sum import exact_sum as exact_sum
from ._linalg import cholesky as cholesky
from ._linalg import det as det
from ._linalg import inverse as inverse
from ._linalg import lstsq as lstsq
from ._linalg import qr as qr
from ._linalg import solve as solve
from ._matmul import matmul as matmul
from ._matmul_wide import half_components as half_components
from ._matmul_wide import largest_magnitude as largest_magnitude
from ._matmul_wide import single_product as single_product
from ._parts import compare as compare
from ._parts import merge as merge
from ._parts import renormalize as renormalize
from ._parts import split as split
from ._pointwise import MOST as MOST
from ._pointwise import PRECISION as PRECISION
from ._pointwise import Parts as Parts
from ._pointwise import names as names
from ._pointwise import pointwise as pointwise
from ._reduction import product as product
from ._reduction import running as running
from ._reduction import total as total
