"""Hand-made roundings that share nothing with the library: integers on the bits, and one autograd function."""

import torch


def nearest(x: torch.Tensor, mantissa_bits: int) -> torch.Tensor:
    """Round finite float32 numbers to a format with float32's exponents, ties to even."""
    lost = 23 - mantissa_bits
    bits = x.detach().contiguous().view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    half = (1 << (lost - 1)) - 1 + (bits >> lost & 1)
    rounded = (bits + half) >> lost << lost
    return ((rounded << 32) >> 32).to(torch.int32).view(torch.float32)


class Q(torch.autograd.Function):
    """Round forward and backward."""

    @staticmethod
    def forward(ctx, x, mantissa_bits):
        ctx.mantissa_bits = mantissa_bits
        return nearest(x, mantissa_bits)

    @staticmethod
    def backward(ctx, gradient):
        return nearest(gradient, ctx.mantissa_bits), None


class FromResult(torch.autograd.Function):
    """An operator whose derivative reads its result: what it has stored is the rounded one."""

    @staticmethod
    def forward(ctx, x, function, derivative, mantissa_bits):
        y = nearest(function(x), mantissa_bits)
        ctx.save_for_backward(y)
        ctx.derivative = derivative
        return y

    @staticmethod
    def backward(ctx, gradient):
        return ctx.derivative(gradient, *ctx.saved_tensors), None, None, None


class Oracle:
    """Calls functions as operators of a format: inputs' gradients, the output and its gradient are rounded."""

    def __init__(self, mantissa_bits: int) -> None:
        self.mantissa_bits = mantissa_bits

    def q(self, x: torch.Tensor) -> torch.Tensor:
        return Q.apply(x, self.mantissa_bits)

    def __call__(self, function, *args, **kwargs):
        inputs = [self.q(a) if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args]
        return self.q(function(*inputs, **kwargs))

    def from_result(self, function, derivative, x):
        return self.q(FromResult.apply(self.q(x), function, derivative, self.mantissa_bits))

    def exp(self, x):
        return self.from_result(torch.exp, torch.mul, x)

    def tanh(self, x):
        return self.from_result(torch.tanh, torch.ops.aten.tanh_backward, x)

    def softmax(self, x):
        def derivative(gradient, y):
            return torch.ops.aten._softmax_backward_data(gradient, y, -1, torch.float32)

        return self.from_result(lambda x: torch.softmax(x, -1), derivative, x)
