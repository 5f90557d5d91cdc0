"""Hyperbolic space: distances, geodesics and Riemannian optimizers, on plain tensors and MCTensors."""

from .. import _needs_torch as _needs_torch
from ._graph_embedding import RankingSets as RankingSets
from ._graph_embedding import Reconstruction as Reconstruction
from ._graph_embedding import evaluate_reconstruction as evaluate_reconstruction
from ._graph_embedding import ranking_loss as ranking_loss
from ._graph_embedding import ranking_loss_and_gradient as ranking_loss_and_gradient
from ._models import HalfSpace as HalfSpace
from ._models import Manifold as Manifold
from ._models import PoincareBall as PoincareBall
from ._models import manifold as manifold
from ._optimizer import RiemannianAdam as RiemannianAdam
from ._optimizer import RiemannianOptimizer as RiemannianOptimizer
from ._optimizer import RiemannianSGD as RiemannianSGD
