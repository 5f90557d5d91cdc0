"""Checks the version of torch; every package of tensors imports this module first."""

import torch  # noqa: F401

from ._torch_floor import check_torch_version

check_torch_version()
