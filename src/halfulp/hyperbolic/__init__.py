"""Hyperbolic space: distances, geodesics and Riemannian optimizers, on plain tensors and MCTensors."""

from .. import _needs_torch as _needs_torch
from ._half_space import HalfSpace as HalfSpace
from ._manifold import Manifold as Manifold
from ._models import manifold as manifold
from ._optimizer import RiemannianAdam as RiemannianAdam
from ._optimizer import RiemannianOptimizer as RiemannianOptimizer
from ._optimizer import RiemannianSGD as RiemannianSGD
from ._poincare_ball import PoincareBall as PoincareBall
from ._ranking import RankingSets as RankingSets
from ._ranking import ranking_gradient as ranking_gradient
from ._ranking import ranking_loss as ranking_loss
from ._reconstruction import Reconstruction as Reconstruction
from ._reconstruction import reconstruction as reconstruction
