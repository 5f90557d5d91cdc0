"""Two computations that should agree: replicas, compiled and eager, recomputed, a loss and its change."""
