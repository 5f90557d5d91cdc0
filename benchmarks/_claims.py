"""The small experiments behind the claims: each returns one figure for any optimizer, ours or a peer's."""

from collections.abc import Callable, Iterable

BETAS = (0.9, 0.999)


def weights(elements: int, scale: float = 0.02, dtype=None):
    """A module that holds one parameter of standard normal numbers times ``scale``, bfloat16 unless told."""
    import torch

    generator = torch.Generator().manual_seed(1)
    model = torch.nn.Module()
    values = scale * torch.randn(elements, generator=generator)
    model.weight = torch.nn.Parameter(values.to(dtype or torch.bfloat16))
    return model


def decoded(optimizer, model):
    """The weight with everything that the optimizer keeps beside it, in float64."""
    if hasattr(optimizer, "float32_state_dict"):
        return optimizer.float32_state_dict(model)["weight"].double()
    state = optimizer.state.get(model.weight, {})
    beside = state.get("kahan_comp")
    value = model.weight.detach().double()
    return value if beside is None else value + beside.double()


def decay(make: Callable, elements: int = 1 << 17, steps: int = 2000, dtype=None) -> float:
    """sum(w sign w0) / sum|w0| after AdamW steps without a gradient, at lr 1e-3 and weight decay 0.1."""
    import torch

    model = weights(elements, dtype=dtype)
    start = model.weight.detach().double()
    optimizer = make(model.parameters(), lr=1e-3, betas=BETAS, eps=1e-8, weight_decay=0.1)
    for _ in range(steps):
        model.weight.grad = torch.zeros_like(model.weight)
        optimizer.step()
    return float((decoded(optimizer, model) * start.sign()).sum() / start.abs().sum())


def stored_second_moment(optimizer, weight):
    """The second moment that an optimizer stores, in float64.

    Raises:
        KeyError: nothing in its state is called like one.
    """
    own = optimizer.state[weight]
    if "exp_avg_sq_scale" in own:
        return blocks(own["exp_avg_sq"], own["exp_avg_sq_scale"])
    pending = [optimizer.state[weight]]
    while pending:
        state = pending.pop()
        for name, value in state.items():
            if "exp_avg_sq" in str(name):
                value = value[0] if isinstance(value, list | tuple) else value
                return value.dequantize().double() if hasattr(value, "dequantize") else value.double()
            if isinstance(value, dict):
                pending.append(value)
    raise KeyError(f"no second moment among {list(optimizer.state[weight])}")


def blocks(codes, scale):
    """8-bit second moments decoded as they are documented: (code x scale / 255)^2, one scale per block."""
    each = codes.numel() // scale.numel()
    return (codes.flatten().double() * scale.double().repeat_interleave(each) / 255).square()


def second_moment(
    make: Callable, beta2: float, before: int, after: int, marks: Iterable[int] = (), elements: int = 1 << 14
) -> list[tuple[float, float]]:
    """Stored over float64's: sum of sqrt(v), and square root of the sum of v.

    Looked at after ``before`` steps, at ``marks`` steps after the drop, and ``after`` steps after it. Gradients are
    normal with deviation 1 for ``before`` steps and 0.1 for ``after`` steps.
    """
    import torch

    model = weights(elements, scale=1.0)
    optimizer = make(model.parameters(), lr=1e-6, betas=(0.9, beta2), eps=1e-8, weight_decay=0.0)
    exact = torch.zeros(elements, dtype=torch.float64)
    generator = torch.Generator().manual_seed(2)
    stops, ratios = {before, before + after, *(before + mark for mark in marks)}, []
    for step in range(1, before + after + 1):
        gradient = torch.randn(elements, generator=generator) * (1.0 if step <= before else 0.1)
        model.weight.grad = gradient.bfloat16()
        exact.mul_(beta2).add_(model.weight.grad.double().square(), alpha=1 - beta2)  # a peer may write into it
        optimizer.step()
        if step in stops:
            stored = stored_second_moment(optimizer, model.weight).flatten()[:elements]
            roots, total = stored.sqrt().sum() / exact.sqrt().sum(), (stored.sum() / exact.sum()).sqrt()
            ratios.append((float(roots), float(total)))
    return ratios


def drift(
    make: Callable, exponent: int, momentum: float = 0.0, steps: int = 2000, elements: int = 1 << 16
) -> tuple[float, float]:
    """How much of a constant update of 2^exponent times the weight is kept: mean, and deviation over elements.

    ``make`` makes an SGD; the gradient is the first weight times 2^exponent, exactly, at learning rate 1 - momentum,
    so that the update is the same at any momentum once it is under way.
    """
    import torch

    model = weights(elements)
    with torch.no_grad():
        model.weight.copy_(0.01 + 0.02 * torch.rand(elements, generator=torch.Generator().manual_seed(3)))
    start = model.weight.detach().double()
    optimizer = make(model.parameters(), lr=1.0 - momentum, momentum=momentum)
    model.weight.grad = -(model.weight.detach() * 2.0**exponent)
    update = -model.weight.grad.double()
    for _ in range(steps):
        optimizer.step()
    whole = steps - momentum / (1 - momentum) * (1 - momentum**steps)
    kept = (decoded(optimizer, model) - start) / (whole * update)
    return float(kept.mean()), float(kept.std())


def update_error(make: Callable, scale: float, eps: float, steps: int = 30, elements: int = 1 << 14) -> float:
    """One AdamW update against float64's after ``steps`` steps: |u - u64| / |u64| over all elements.

    The parameter is float32, so that only the states are narrow, and it is put back to zero before every step.
    """
    import torch

    model = weights(elements, scale=0.0, dtype=torch.float32)
    beta1, beta2 = BETAS
    optimizer = make(model.parameters(), lr=1.0, betas=BETAS, eps=eps, weight_decay=0.0)
    generator = torch.Generator().manual_seed(4)
    m, v = torch.zeros(2, elements, dtype=torch.float64)
    for _ in range(steps):
        gradient = scale * torch.randn(elements, generator=generator, dtype=torch.float64)
        model.weight.grad = gradient.float()
        gradient = model.weight.grad.double()
        with torch.no_grad():
            model.weight.zero_()
        optimizer.step()
        m.mul_(beta1).add_(gradient, alpha=1 - beta1)
        v.mul_(beta2).add_(gradient.square(), alpha=1 - beta2)
    wanted = -(m / (1 - beta1**steps)) / ((v / (1 - beta2**steps)).sqrt() + eps)
    found = model.weight.detach().double()
    return float((found - wanted).norm() / wanted.norm())


def one_update_error(make: Callable, scale: float, steps: int = 2000, elements: int = 1 << 14) -> float:
    """|u - u64| / |u64| of one update whose states were stored once: exact ones of ``steps`` steps, taken over."""
    import torch

    model, twin = (weights(elements, scale=0.0, dtype=torch.float32) for _ in range(2))
    twin = torch.nn.Parameter(twin.weight.detach().double())
    settings = {"lr": 1.0, "betas": BETAS, "eps": 1e-8, "weight_decay": 0.0}
    exact = torch.optim.AdamW([twin], **settings)
    generator = torch.Generator().manual_seed(4)
    gradients = (scale * torch.randn(elements, generator=generator) for _ in range(steps + 1))
    for _ in range(steps):
        twin.grad = next(gradients).double()
        exact.step()
    optimizer = make(model.parameters(), **settings)
    state = exact.state_dict()
    state["state"][0] = {name: value.float() for name, value in state["state"][0].items()}
    optimizer.load_state_dict({"state": state["state"], "param_groups": optimizer.state_dict()["param_groups"]})
    with torch.no_grad():
        twin.zero_()
    twin.grad = next(gradients).double()
    model.weight.grad = twin.grad.float()
    exact.step()
    optimizer.step()
    return float((model.weight.detach() - twin.detach()).norm() / twin.detach().norm())


def neighbours(make: Callable, factor: float = 200.0, steps: int = 200, elements: int = 1 << 14) -> float:
    """The largest update of an ordinary element, in learning rates, where one in 32 has gradients ``factor`` larger."""
    import torch

    model = weights(elements, scale=0.0, dtype=torch.float32)
    optimizer = make(model.parameters(), lr=1.0, betas=BETAS, eps=1e-8, weight_decay=0.0)
    generator = torch.Generator().manual_seed(5)
    loud = torch.arange(elements) % 32 == 7
    worst = 0.0
    for _ in range(steps):
        gradient = torch.randn(elements, generator=generator)
        model.weight.grad = torch.where(loud, gradient * factor, gradient)
        with torch.no_grad():
            model.weight.zero_()
        optimizer.step()
        worst = max(worst, float(model.weight.detach()[~loud].abs().max()))
    return worst


def compiled_error(make: Callable, compiled: bool, steps: int = 20, elements: int = 1 << 16) -> float:
    """|weight + residual - float64's| over the whole update, the step compiled or not."""
    import torch

    model = weights(elements)
    optimizer = make(model.parameters(), lr=1e-5, betas=BETAS, eps=1e-8, weight_decay=0.0)
    start = model.weight.detach().double()
    twin = torch.nn.Parameter(start.clone())
    reference = torch.optim.AdamW([twin], lr=1e-5, betas=BETAS, eps=1e-8, weight_decay=0.0)
    torch._dynamo.reset()
    step = torch.compile(optimizer.step) if compiled else optimizer.step
    generator = torch.Generator().manual_seed(6)
    drawn = torch.randn(elements, generator=generator)
    for _ in range(steps):
        model.weight.grad = (drawn + 0.1 * torch.randn(elements, generator=generator)).bfloat16()
        twin.grad = model.weight.grad.double()
        step()
        reference.step()
    error = decoded(optimizer, model) - twin.detach()
    return float(error.norm() / (twin.detach() - start).norm())
