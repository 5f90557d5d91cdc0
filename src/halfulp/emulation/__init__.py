"""A model as if on hardware of a format: every operator's output is rounded, forward and backward."""

from .. import _needs_torch as _needs_torch
from ._emulate import Emulation as Emulation
from ._emulate import emulate as emulate
from ._region import region as region
