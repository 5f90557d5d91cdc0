"""Rounding to formats: the modes, `quantize`, counter-based random bits, statistics of a tensor in a format."""

from .. import _needs_torch as _needs_torch
from ._modes import Down as Down
from ._modes import Nearest as Nearest
from ._modes import Rounding as Rounding
from ._modes import Stochastic as Stochastic
from ._modes import TowardZero as TowardZero
from ._modes import Up as Up
from ._modes import get_rounding as get_rounding
from ._modes import register_rounding as register_rounding
from ._modes import rounding_names as rounding_names
from ._quantize import quantize as quantize
from ._random_bits import mix64 as mix64
from ._random_bits import mix64_all as mix64_all
from ._random_bits import random_words as random_words
from ._statistics import Fit as Fit
from ._statistics import fit as fit
from ._straight_through import StraightThrough as StraightThrough
from ._straight_through import straight_through as straight_through
