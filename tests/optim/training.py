"""A small problem, and some steps of an optimizer on it."""

import torch

STEPS = 24


def train(kind, start, gradients, each_step=lambda parameters: None, **options):
    parameters = [torch.nn.Parameter(tensor.clone()) for tensor in start]
    for parameter in parameters:
        parameter.grad_dtype = None
    optimizer = kind(parameters, **options)
    for step in gradients:
        for parameter, gradient in zip(parameters, step):
            parameter.grad = gradient.clone()
        optimizer.step()
        each_step(parameters)
    return parameters, optimizer


def make_problem(seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(37, 5), (1,), ()]
    start = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    gradients = [[torch.randn(shape, generator=generator) for shape in shapes] for _ in range(STEPS)]
    # Adam's first step divides the sum of gradient and decay by its own size: they must not cancel to their rounding.
    gradients[0] = [gradient + 0.5 * gradient.sign() for gradient in gradients[0]]
    return start, gradients
