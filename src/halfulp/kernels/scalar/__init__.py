"""Operations on one element: what device functions call, in plain Python, recorded as traces, and on tensors."""
