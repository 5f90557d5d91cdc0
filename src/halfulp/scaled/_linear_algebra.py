"""Rules of factorisations and solvers: computed on values in float32, the scale of each result measured.

Measuring is independent of how the operand was represented, and a result has the bits of the plain operator's. What a
factorisation packs into one matrix, as LU does, has no single degree in the operand's scale.
"""

import torch

from ._families import measured, overloads

aten = torch.ops.aten

measured(
    *overloads(aten.linalg_inv_ex, aten._linalg_solve_ex, aten.linalg_solve_triangular, aten.triangular_solve),
    *overloads(aten.linalg_cholesky_ex, aten.cholesky, aten.cholesky_solve, aten.cholesky_inverse),
    *overloads(aten.linalg_lu, aten.linalg_lu_factor_ex, aten.linalg_lu_solve, aten.lu_unpack, aten._lu_with_info),
    *overloads(aten.linalg_ldl_factor_ex, aten.linalg_ldl_solve, aten._linalg_det, aten._linalg_slogdet),
    *overloads(aten.linalg_qr, aten.geqrf, aten.linalg_householder_product, aten.ormqr),
    *overloads(aten._linalg_svd, aten._linalg_eigh, aten._linalg_eigvals, aten.linalg_eig, aten.linalg_eigvals),
    *overloads(aten.linalg_lstsq, aten.linalg_pinv, aten.linalg_matrix_exp),
    *overloads(aten._compute_linear_combination),
    family="linear algebra",
)
