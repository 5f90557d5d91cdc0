"""The parameters of a 20.8M transformer, and every optimizer that is stepped on them."""

from collections.abc import Callable

WIDTH = 416
LAYERS = 10
SHAPES = [(3 * WIDTH, WIDTH), (WIDTH, WIDTH), (4 * WIDTH, WIDTH), (WIDTH, 4 * WIDTH), (WIDTH,), (WIDTH,)] * LAYERS
SETTINGS = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
PEER = "torch fused float32"
OURS = {
    "halfulp nearest": ("nearest", "bf16"),
    "halfulp stochastic": ("stochastic", "bf16"),
    "halfulp kahan": ("kahan", "bf16"),
    "halfulp kahan-stochastic": ("kahan-stochastic", "bf16"),
    "halfulp split": ("split", "bf16"),
    "halfulp split8": ("split8", "bf16"),
    "halfulp split8, 8-bit states": ("split8", "8bit"),
    "halfulp stochastic, 8-bit states": ("stochastic", "8bit"),
    "halfulp feedback": ("feedback", "bf16"),
    "halfulp master": ("master", "bf16"),
    "halfulp float32": (None, "fp32"),
}


def parameters(dtype, shapes=None) -> list:
    """Fresh parameters with gradients, of one dtype; the same numbers at every call."""
    import torch

    generator = torch.Generator().manual_seed(0)
    made = []
    for shape in shapes or SHAPES:
        weight = torch.nn.Parameter((0.02 * torch.randn(shape, generator=generator)).to(dtype))
        weight.grad = (1e-3 * torch.randn(shape, generator=generator)).to(dtype)
        made.append(weight)
    return made


def ours(name: str, params: list):
    """One of halfulp's optimizers by the name of its row."""
    import torch

    import halfulp as hu

    update, state = OURS[name]
    if update is None:
        return hu.optim.AdamW(params, **SETTINGS)
    states = torch.bfloat16 if state == "bf16" else state
    return hu.optim.AdamW(params, weight_update=update, state_dtype=states, **SETTINGS)


def torchao(params: list):
    """torchao's AdamW that rounds bf16 weights stochastically."""
    from torchao.optim.adam import _AdamW

    return _AdamW(params, bf16_stochastic_round=True, **SETTINGS)


def optimi(params: list, foreach: bool):
    """optimi's AdamW with Kahan summation."""
    import optimi

    return optimi.AdamW(params, kahan_sum=True, foreach=foreach, triton=False, **SETTINGS)


def heavyball(params: list):
    """HeavyBall's AdamW, which rounds every bf16 store stochastically."""
    import heavyball

    return heavyball.AdamW(params, consume_grad=False, **SETTINGS)


def peers() -> dict[str, tuple[str, Callable]]:
    """Row name -> (dtype, maker) for every optimizer that is not ours."""
    import torch

    adamw = torch.optim.AdamW
    return {
        PEER: ("float32", lambda params: adamw(params, fused=True, **SETTINGS)),
        "torch foreach float32": ("float32", lambda params: adamw(params, foreach=True, **SETTINGS)),
        "torch fused bf16 (nearest)": ("bfloat16", lambda params: adamw(params, fused=True, **SETTINGS)),
        "torchao stochastic": ("bfloat16", torchao),
        "optimi kahan, foreach": ("bfloat16", lambda params: optimi(params, True)),
        "optimi kahan, loop": ("bfloat16", lambda params: optimi(params, False)),
        "heavyball stochastic": ("bfloat16", heavyball),
    }


def dtype(name: str):
    """The dtype of a row's parameters."""
    import torch

    if name in OURS:
        return torch.float32 if OURS[name][0] is None else torch.bfloat16
    return getattr(torch, peers()[name][0])


def make(name: str, shapes=None, params: list | None = None):
    """An optimizer by the name of its row, on the given parameters or fresh ones.

    Raises:
        Exception: whatever the peer raises where it cannot be used.
    """
    params = params or parameters(dtype(name), shapes)
    return ours(name, params) if name in OURS else peers()[name][1](params)
