"""Rules of factorisations and solvers: computed on values in float32, the scale of each result measured.

Measuring is independent of how the operand was represented, and a result has the bits of the plain operator's. What a
factorisation packs into one matrix, as LU does, has no single degree in the operand's scale.
"""

from typing import Any

from torch import Tensor
from torch._ops import OpOverload

from ....kernels import torch_operators
from ..._registry import implements
from .._results import measured_like, value_of
from .._vocabulary import measured_scale, overloads

aten = torch_operators("aten")

measured_scale(
    *overloads(aten.linalg_inv_ex, aten.linalg_solve_triangular, aten.triangular_solve),
    *overloads(aten.linalg_cholesky_ex, aten.cholesky, aten.cholesky_solve, aten.cholesky_inverse),
    *overloads(aten.linalg_lu, aten.linalg_lu_factor_ex, aten.linalg_lu_solve, aten.lu_unpack, aten._lu_with_info),
    *overloads(aten.linalg_ldl_factor_ex, aten.linalg_ldl_solve),
    *overloads(aten.linalg_qr, aten.geqrf, aten.linalg_householder_product, aten.ormqr),
    *overloads(aten._linalg_svd, aten._linalg_eigh, aten._linalg_eigvals, aten.linalg_eig, aten.linalg_eigvals),
    *overloads(aten.linalg_lstsq, aten.linalg_pinv, aten.linalg_matrix_exp),
    *overloads(aten._compute_linear_combination),
    family="linear algebra",
)


def _factored(operator: OpOverload) -> None:
    """Register an operator that factors the transpose of a contiguous matrix, as its gradient then takes it to have."""

    def rule(matrix: Tensor, *arguments: Any, **options: Any) -> tuple:
        values = value_of(matrix)
        if values.is_contiguous() and not matrix.is_contiguous():
            values = values.mT.contiguous().mT
        holders = [x for x in (matrix, *arguments) if isinstance(x, Tensor)]
        results = operator(values, *map(value_of, arguments), **options)
        return tuple(measured_like(y, holders) for y in results)

    implements(operator, family="linear algebra")(rule)


for _operator in (aten._linalg_det.default, aten._linalg_slogdet.default, aten._linalg_solve_ex.default):
    _factored(_operator)
