"""The dtypes of exact sums, and to which of them a run rounds sums and dot products of each: every pair is a kernel."""

import torch

from ...samples import matched

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
RESULTS = {product: matched(DTYPES, of=product) for product in (False, True)}
