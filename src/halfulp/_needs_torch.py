"""What every package of tensors imports first, so that of a torch that is too old just that is said."""

import torch  # noqa: F401

from ._torch_floor import check

check()
