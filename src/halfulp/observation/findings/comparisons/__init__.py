"""Two computations that should agree: replicas, compiled and eager, recomputed, a loss and its change."""

from ._compiled_differs import CompiledDiffers as CompiledDiffers
from ._loss_cancels import LossCancels as LossCancels
from ._recompute_differs import RecomputeDiffers as RecomputeDiffers
from ._replicas_differ import ReplicasDiffer as ReplicasDiffer
