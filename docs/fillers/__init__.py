"""What fills the places of the pages: small functions, each named like its place, in files by subject."""

from . import comparisons, gradients, library, mctensor, optimizers, peers, scaled, verification
from ._places import PLACES

__all__ = ["PLACES", "comparisons", "gradients", "library", "mctensor", "optimizers", "peers", "scaled", "verification"]
