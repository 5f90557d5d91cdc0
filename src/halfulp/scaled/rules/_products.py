"""Rules of products: matrices, convolutions, linear algebra, and a product that is added to something.

Factorisations and solvers are computed on values in float32, the scale of each result measured, so that a result has
the bits of the plain operator's. What a factorisation packs into one matrix, as LU does, has no single degree in the
operand's scale.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from ...environment._narrow_products import list_dtypes_multiplied_in_float32
from ...kernels import define_operator
from ...subclass._derivation import aten
from .. import _fused as fused
from .. import _powers_of_two as _powers
from .._float8 import eight_bit_engine
from .._operands import (
    choose_product_storage,
    choose_storage,
    encode_ignoring_outliers,
    encode_operand,
    encode_product_operand,
    find_outliers,
    find_scaled_tensor,
    fit_payload,
    is_symbolic,
    promote_dtypes,
    raise_underflows_to_smallest,
    round_second_moment_above_zero,
    saturate_outliers,
    split_off_power_of_two,
)
from .._registry import EIGHT_BIT_DTYPES, RULES_OF_OPERATORS_DEFINED_LATER, implements, implements_each
from .._scaled_tensor import ScaledTensor, get_float32_payload, wrap_payload
from ._aligned import add
from ._vocabulary import (
    align_operands,
    convert_argument_to_float32,
    encode_results,
    make_scaled_result,
    round_root_to_power_of_two,
    wrap_rule_payload,
)

EIGHT_BIT_MATRIX_SIDE_MULTIPLE = 16  # torch._scaled_mm takes multiples of this


def _multiply_into_float32(a: Tensor, b: Tensor) -> Tensor:
    packet = aten.mm if a.dim() == 2 else aten.bmm
    if hasattr(packet, "dtype") and has_products_into_float32(a.device):
        return packet.dtype(a, b, torch.float32)
    return packet.default(a.to(torch.float32), b.to(torch.float32))


# The product of two matrices, or batches of some, of float16: exact products, summed in float32. An operator, as
# compilers cannot ask the device while they trace, and not all of them know torch's products with another dtype.
multiply_into_float32 = define_operator(
    "multiply_into_float32(Tensor a, Tensor b) -> Tensor",
    _multiply_into_float32,
    lambda a, b: a.new_empty((*a.shape[:-1], b.shape[-1]), dtype=torch.float32),
)


@functools.cache
def has_products_into_float32(device: torch.device) -> bool:
    """Return whether torch multiplies float16 matrices on a device into float32 results: newer versions do on CUDA."""
    if device.type != "cuda":
        return False
    try:
        ones = torch.ones(2, 16, 16, dtype=torch.float16, device=device)
        aten.bmm.dtype(ones, ones, torch.float32)
        aten.mm.dtype(ones[0], ones[1], torch.float32)
    except (NotImplementedError, RuntimeError):  # of other versions, and of ROCm
        return False
    return True


def invert_scale(scale: Tensor) -> Tensor | float:
    """Return 1 / scale as a factor; 1 for zeros of any scale, whose quotients would decide alignments."""
    value = _powers.read_scale(scale)
    if value is not None:
        return 1.0 if value == _powers.SCALE_OF_ZEROS else 1.0 / value
    return torch.where(scale == _powers.SCALE_OF_ZEROS, torch.ones_like(scale), scale).double().reciprocal()


def divide_scale_product(*factors: Tensor | float, scale: Tensor) -> Tensor | float:
    """Return the product of some scales divided by another: the factor that brings payloads under it."""
    # A normal float32 number, as an infinity under the scale of zeros must not meet a factor of 0.
    values: list[Any] = [_powers.read_scale(factor) if isinstance(factor, Tensor) else factor for factor in factors]
    held = _powers.read_scale(scale)
    if held is not None and None not in values:
        return min(max(math.prod(values) / held, _powers.SMALLEST_SCALE), _powers.LARGEST_SCALE)
    total = functools.reduce(torch.mul, factors, scale.double().reciprocal())
    return total.clamp(_powers.SMALLEST_SCALE, _powers.LARGEST_SCALE).to(torch.float32)


def make_scale_of_zeros(x: ScaledTensor) -> Tensor:
    """Return the scale of zeros, which decides nothing."""
    return torch.full_like(x._scale, _powers.SCALE_OF_ZEROS)


# Matrix products, and the operators that apply a factor to the result without another pass over it.
_ADDING_PRODUCT_BY_PRODUCT = {aten.mm.default: aten.addmm.default, aten.bmm.default: aten.baddbmm.default}


def _is_float16_product_on_cuda(a: Tensor, b: Tensor) -> bool:
    """Return whether payloads are float16 on CUDA, where products in float32 take several times longer."""
    return a.dtype == b.dtype == torch.float16 and (a.device.type == "cuda" or _powers.has_fused_kernels(a))


def _multiply_payloads(operator: OpOverload, x: ScaledTensor, y: ScaledTensor, factor: float) -> tuple[Tensor, float]:
    """Return a product of payloads, and the part of the factor that it still lacks."""
    left, right = x._payload, y._payload
    if operator is aten.mm.default and can_multiply_in_eight_bits(left, right):
        return multiply_eight_bit_matrices(left, right, factor), 1.0
    if operator not in _ADDING_PRODUCT_BY_PRODUCT:
        return operator(get_float32_payload(x), get_float32_payload(y)), factor
    if _is_float16_product_on_cuda(left, right):
        return multiply_into_float32(left, right), factor
    left, right = _choose_product_payloads(x, y)
    if type(left) is not Tensor or factor == 1.0:
        return operator(left, right), factor
    return _ADDING_PRODUCT_BY_PRODUCT[operator](left.new_empty(()), left, right, beta=0, alpha=factor), 1.0


def encode_matrix_operand(x: Any, like: ScaledTensor) -> ScaledTensor:
    """Return an operand of a matrix product; beside bfloat16, of float32's range, a plain one is rounded to it."""
    wide = encode_product_operand(x, like)
    if wide is x or like._payload.dtype != torch.bfloat16:
        return wide
    return wrap_payload(wide._payload.to(torch.bfloat16), wide._scale, wide.dtype)


def _choose_product_payloads(*tensors: ScaledTensor) -> list[Tensor]:
    """Return payloads for a matrix product: bfloat16, which torch sums in float32 and rounds once, or float32."""
    # float16 would leave its range before the sum is brought back.
    payloads = [x._payload for x in tensors]
    # Processors without instructions for bfloat16 get float32 too.
    native = tensors[0].device.type != "cpu" or torch.bfloat16 not in list_dtypes_multiplied_in_float32()
    if native and all(payload.dtype == torch.bfloat16 for payload in payloads):
        return payloads
    return [get_float32_payload(x) for x in tensors]


@implements_each(
    *(aten.mm.default, aten.bmm.default, aten.mv.default, aten.dot.default, aten.vdot.default), family="bilinear"
)
def multiply_matrices(operator: OpOverload, a: Any, b: Any) -> Tensor:
    """op(pa, pb) / c under the scale sa sb c, with c the power of two below the square root of a sum's terms."""
    like = find_scaled_tensor((a, b))
    x, y = (encode_matrix_operand(t, like) for t in (a, b))
    sum_scale = round_root_to_power_of_two(a.shape[-1])
    values, factor = _multiply_payloads(operator, x, y, 1.0 / sum_scale)
    storage, dtype = choose_product_storage((a, b)), promote_dtypes((a, b))
    return make_scaled_result(values, (x._scale, y._scale), storage, dtype, sum_scale, factor)


@implements(aten.mm.dtype, aten.bmm.dtype, aten.addmm.dtype, aten.baddbmm.dtype, family="bilinear")
def refuse_out_dtype(*arguments: Any, **options: Any) -> Tensor:
    """Refuse products of another logical dtype."""
    raise NotImplementedError("products of ScaledTensors take no out_dtype=: convert the result, (a @ b).to(dtype)")


@implements(aten.mul.Tensor, aten.mul.Scalar, family="bilinear")
def mul(a: Any, b: Any) -> Tensor:
    """pa pb under the scale sa sb; a number is split at the power of two next to it in log2."""
    if not isinstance(a, Tensor):
        a, b = b, a
    dtype = promote_dtypes((a, b))
    if not isinstance(b, Tensor):
        mantissa, power = split_off_power_of_two(b)
        storage = a._payload.dtype
        if power == _powers.SCALE_OF_ZEROS:
            return wrap_rule_payload(get_float32_payload(a) * mantissa, make_scale_of_zeros(a), 1.0, storage, dtype)
        if type(mantissa) is float and mantissa == 1.0:
            scale, rest = _powers.multiply_scales(a._scale, power)
            if type(rest) is float and rest == 1.0:
                return wrap_payload(a._payload.clone(), scale, dtype)
            return wrap_rule_payload(get_float32_payload(a), scale, rest, storage, dtype)
        return make_scaled_result(a._payload, (a._scale,), storage, dtype, power, mantissa)
    if type(a) is type(b) is ScaledTensor:
        # Compilers split addcmul_(g, g) of a second moment: squares need twice the range of what is squared.
        is_square = a is b and not _powers.has_readable_values(a._payload)
        storage = torch.float32 if is_square else choose_storage((a, b))
        return make_scaled_result(get_float32_payload(a) * get_float32_payload(b), (a._scale, b._scale), storage, dtype)
    like, storage = find_scaled_tensor((a, b)), choose_storage((a, b))
    x, y = encode_ignoring_outliers(a, like, among_zeros=False), encode_ignoring_outliers(b, like, among_zeros=False)
    scale, rest = _powers.multiply_scales(x._scale, y._scale)
    large = [find_outliers(factor, like, among_zeros=False) for factor in (a, b)]
    values = saturate_outliers(get_float32_payload(x) * get_float32_payload(y), scale, storage, *large)
    return wrap_rule_payload(values, scale, rest, storage, dtype)


@implements(aten.div.Tensor, aten.div.Scalar, family="bilinear")
def div(a: Any, b: Any) -> Tensor:
    """pa / pb under the scale sa / sb."""
    dtype = promote_dtypes((a, b))
    if not isinstance(b, Tensor):
        mantissa, power = (0.0, 1.0) if not is_symbolic(b) and b == 0 else split_off_power_of_two(b)
        scale, rest = _powers.multiply_scales(a._scale, 1.0 / power)
        return wrap_rule_payload(get_float32_payload(a) / mantissa, scale, rest, a._payload.dtype, dtype)
    like = find_scaled_tensor((a, b))
    x, y = encode_ignoring_outliers(a, like, among_zeros=False), encode_ignoring_outliers(b, like, among_zeros=False)
    scale, rest = _powers.multiply_scales(x._scale, invert_scale(y._scale))
    rest = _restore_inverse_of_zero_scale(y._scale, rest)
    values, storage = get_float32_payload(x) / get_float32_payload(y), choose_storage((a, b))
    values = saturate_outliers(values, scale, storage, find_outliers(a, like), find_outliers(b, like, inverse=True))
    return wrap_rule_payload(values, scale, rest, storage, dtype)


def _restore_inverse_of_zero_scale(divisor: Tensor, rest: Tensor | float) -> Tensor | float:
    """Put back what `invert_scale` left out for a divisor under the smallest scale."""
    value = _powers.read_scale(divisor)
    if value is not None:
        return rest / _powers.SCALE_OF_ZEROS if value == _powers.SCALE_OF_ZEROS else rest
    return torch.where(divisor == _powers.SCALE_OF_ZEROS, 1.0 / _powers.SCALE_OF_ZEROS, 1.0) * rest


def add_scaled_product(
    base: Any,
    a: Any,
    b: Any,
    compute: Callable,
    *,
    sum_scale: float = 1.0,
    beta: Any = 1,
    alpha: Any = 1,
    quotient: bool = False,
    of_matrices: bool = False,
    separate: OpOverload | None = None,
) -> ScaledTensor:
    """beta base + alpha a b, computed and rounded once, under the larger of the two parts' scales.

    `compute` is addmm's arithmetic on float32 payloads and the numbers beta and alpha. With `quotient` a / b takes the
    place of a b, whose payload `sum_scale` brings back, a power of two. `of_matrices`: all elements of a and b have a
    say in the scale of a b; `separate` is the product of matrices alone, where compute is one and a sum.
    """
    like = find_scaled_tensor((base, a, b))
    storage, dtype = choose_product_storage((base, a, b)), promote_dtypes((base, a, b))
    encode_product_operand = (
        encode_matrix_operand if separate else encode_operand if of_matrices else encode_ignoring_outliers
    )
    large = [find_outliers(base, like, beta)]
    base, x, y = (
        encode_ignoring_outliers(base, like, beta),
        encode_product_operand(a, like),
        encode_product_operand(b, like),
    )
    if separate is not None and large == [None] and _is_added_after_product(base, x, y, beta, alpha):
        values, factor = _multiply_payloads(separate, x, y, 1.0 / sum_scale)
        product = make_scaled_result(values, (x._scale, y._scale), torch.float32, dtype, sum_scale, factor)
        if fused.has_equal_or_repeating_layout(product._payload, base._payload):
            scales = product._scale, base._scale
            return wrap_payload(*fused.add_payloads(product._payload, base._payload, *scales, storage), dtype)
    factors = (x._scale, invert_scale(y._scale) if quotient else y._scale)
    added = None
    if not of_matrices:
        added, places = _encode_product_of_plain_operands(a, b, like, alpha, quotient)
        large += places
    powers = split_off_power_of_two(beta)[1], split_off_power_of_two(alpha)[1] * sum_scale
    is_ordinary = all(_powers.SMALLEST_SCALE < power <= _powers.LARGEST_SCALE for power in powers)
    if _powers.has_fused_kernels(base._payload) and is_ordinary and added is None and not quotient:
        scale, of_base, of_product = fused.compute_addmm_scale_and_factors(base._scale, x._scale, y._scale, *powers)
    else:
        own, _ = _powers.multiply_scales(base._scale, powers[0])
        own = make_scale_of_zeros(base) if not is_symbolic(beta) and beta == 0 else own
        other = _powers.multiply_scales(*factors, powers[1])[0] if added is None else added._scale
        scale = _powers.take_largest_scale(own, other)
        of_base = divide_scale_product(base._scale, scale=scale)
        of_product = divide_scale_product(*factors, scale=scale)
    if quotient:
        of_product = _restore_inverse_of_zero_scale(y._scale, of_product)
    start, left, right = _choose_product_payloads(base, x, y) if separate else map(get_float32_payload, (base, x, y))
    if not isinstance(of_base, Tensor) and not isinstance(of_product, Tensor):
        y = compute(start, left, right, _clamp_to_float32(beta * of_base), _clamp_to_float32(alpha * of_product))
        return wrap_rule_payload(saturate_outliers(y, scale, storage, *large), scale, 1.0, storage, dtype)
    if separate is not None and left.dtype == torch.float32 and (is_symbolic(beta) or beta != 0):
        # Factors after the product fuse with what follows; before it they would cost a pass over a matrix.
        is_wide = _is_float16_product_on_cuda(x._payload, y._payload)
        product = multiply_into_float32(x._payload, y._payload) if is_wide else separate(left, right)
        y = product * _multiply_unless_one(of_product, alpha) + start * _multiply_unless_one(of_base, beta)
        return fit_payload(saturate_outliers(y, scale, storage, *large), scale, storage, dtype)
    # The right operand of a product of matrices is the weight of a layer, mostly the smaller one.
    left, right = (left * of_product, right) if quotient else (left, right * of_product)
    y = compute(start * of_base, left, right, beta, alpha)
    return fit_payload(saturate_outliers(y, scale, storage, *large), scale, storage, dtype)


def _is_added_after_product(base: ScaledTensor, x: ScaledTensor, y: ScaledTensor, beta: Any, alpha: Any) -> bool:
    """Return whether one kernel adds a tensor to a product: not where the product itself adds in bfloat16."""
    if type(beta) not in (int, float) or type(alpha) not in (int, float) or not beta == alpha == 1:
        return False
    is_bfloat16 = all(one._payload.dtype == torch.bfloat16 for one in (base, x, y))
    return not is_bfloat16 and _powers.has_fused_kernels(base._payload) and _powers.has_fused_kernels(x._payload)


def _encode_product_of_plain_operands(
    a: Any, b: Any, like: ScaledTensor, alpha: Any, quotient: bool
) -> tuple[ScaledTensor | None, list[Tensor | None]]:
    """Return alpha a b (a / b) of two plain operands, None of others, and where it stands for infinity."""
    if isinstance(a, ScaledTensor) or isinstance(b, ScaledTensor) or is_symbolic(alpha):
        return None, [find_outliers(a, like, alpha), find_outliers(b, like, alpha, inverse=quotient)]
    product = (a / b if quotient else a * b).to(torch.float32)
    if isinstance(product, Tensor):
        # Finite numbers whose product float32 does not hold stand for infinity, as the largest that it holds does.
        is_beyond = product.isinf()
        for factor in (a, b):
            is_beyond = is_beyond & (factor.isfinite() if isinstance(factor, Tensor) else math.isfinite(factor))
        is_beyond = is_beyond & (b != 0) if quotient else is_beyond
        product = torch.where(is_beyond, _clamp_to_float32(product), product)
    return encode_ignoring_outliers(product * alpha, like), [find_outliers(product, like, alpha)]


def _clamp_to_float32(number: Any) -> Any:
    """Return a number as torch takes it beside float32 matrices; a tensor's numbers within float32's range."""
    largest = _powers.FLOAT32_MAX
    if isinstance(number, Tensor):
        return number.clamp(-largest, largest)
    return number if is_symbolic(number) or not math.isfinite(number) else min(max(number, -largest), largest)


# The product of matrices within an operator that adds one.
_PRODUCT_BY_ADDING_PRODUCT = {aten.addmm.default: aten.mm.default, aten.baddbmm.default: aten.bmm.default}


@implements_each(
    *(*_PRODUCT_BY_ADDING_PRODUCT, aten.addmv.default, aten.addbmm.default, aten.addr.default), family="bilinear"
)
def add_matrix_product(operator: OpOverload, base: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    """beta base + alpha a b, of matrices or vectors."""
    batches = a.shape[0] if operator is aten.addbmm.default else 1
    return add_scaled_product(
        *(base, a, b),
        lambda base, a, b, beta, alpha: operator(base, a, b, beta=beta, alpha=alpha),
        sum_scale=round_root_to_power_of_two(1 if operator is aten.addr.default else batches * a.shape[-1]),
        beta=beta,
        alpha=alpha,
        of_matrices=True,
        separate=_PRODUCT_BY_ADDING_PRODUCT.get(operator),
    )


@implements_each(aten.addcmul.default, aten.addcdiv.default, family="bilinear")
def add_product_or_quotient(operator: OpOverload, base: Any, a: Any, b: Any, *, value: Any = 1) -> Tensor:
    """base + value a b, or base + value a / b."""
    compute = lambda z, x, y, one, v: operator(_multiply_unless_one(z, one), x, y, value=v)  # noqa: E731
    is_quotient = operator is aten.addcdiv.default
    total = add_scaled_product(base, a, b, compute, alpha=value, quotient=is_quotient)
    is_square = not is_quotient and isinstance(base, ScaledTensor) and isinstance(a, ScaledTensor) and a is b
    if not is_square or is_symbolic(value) or not value > 0:
        return total
    # A second moment: squares need twice the range of what is squared, and an optimizer divides by their roots.
    before = get_float32_payload(base)
    return raise_underflows_to_smallest(
        total, torch.where(before >= 0, torch.maximum(get_float32_payload(a).abs(), before), 0.0)
    )


def _multiply_unless_one(payload: Tensor, factor: Any) -> Tensor:
    return payload if type(factor) in (int, float) and factor == 1 else payload * factor


@implements(aten.lerp.Scalar, aten.lerp.Tensor, family="bilinear")
def lerp(a: Any, b: Any, weight: Any) -> Tensor:
    """a + weight (b - a) on payloads under the larger scale: weights are values."""
    if not isinstance(a, ScaledTensor) and not isinstance(b, ScaledTensor):
        a, b = encode_operand(a, weight), encode_operand(b, weight)
    (x, y), scale, storage, dtype = align_operands(a, b)
    operator = aten.lerp.Tensor if isinstance(weight, Tensor) else aten.lerp.Scalar
    return fit_payload(operator(x, y, convert_argument_to_float32(weight)), scale, storage, dtype)


@implements(aten.convolution.default, family="bilinear")
def convolution(
    x: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, transposed: bool, *rest: Any
) -> Tensor:
    """conv(px, pw) / c under the scale sx sw c with c next below the root of the terms of a sum; a bias joins it."""
    given = (x, weight) if bias is None else (x, weight, bias)
    like = find_scaled_tensor(given)
    x, weight = encode_product_operand(x, like), encode_product_operand(weight, like)
    sum_scale = round_root_to_power_of_two(
        _count_convolution_terms(weight, transposed, groups=rest[-1], of_output=True)
    )
    scale, _ = _powers.multiply_scales(x._scale, weight._scale, sum_scale)
    start, large = None, None
    if bias is not None:
        large = find_outliers(bias, like)
        large = large if large is None else large.reshape(-1, *[1] * (weight.dim() - 2))
        bias = encode_ignoring_outliers(bias, like)
        scale = _powers.take_largest_scale(scale, bias._scale)
        start = _powers.multiply_by_power(get_float32_payload(bias), divide_scale_product(bias._scale, scale=scale))
    # All powers of two go into the weight and the bias, so that the result is written once.
    kernel = _powers.multiply_by_power(
        get_float32_payload(weight), divide_scale_product(x._scale, weight._scale, scale=scale)
    )
    values = aten.convolution.default(
        get_float32_payload(x), kernel, start, stride, padding, dilation, transposed, *rest
    )
    storage = choose_product_storage(given)
    return fit_payload(saturate_outliers(values, scale, storage, large), scale, storage, promote_dtypes(given))


@implements(aten.convolution_backward.default, family="bilinear")
def convolution_backward(gradient: Any, x: Any, weight: Any, *rest: Any) -> tuple[Tensor | None, ...]:
    """Return the gradients of the input, the weight and the bias, those that are asked for."""
    given = (gradient, x, weight)
    like = find_scaled_tensor(given)
    gradient, x, weight = (encode_product_operand(tensor, like) for tensor in given)
    payloads = [get_float32_payload(tensor) for tensor in (gradient, x, weight)]
    *_, transposed, _, groups, wanted = rest
    values = aten.convolution_backward.default(*payloads, *rest)
    places = gradient.shape[0] * math.prod(gradient.shape[2:])
    inputs = x.shape[0] * math.prod(x.shape[2:]) if transposed else places
    counts = (_count_convolution_terms(weight, transposed, groups, of_output=False), inputs, places)
    storage = choose_product_storage(given)
    others = ((weight._scale,), (x._scale,), ())
    gradients: list[Tensor | None] = [None, None, None]
    for i, source in enumerate((x, weight, gradient)):
        if wanted[i]:
            sum_scale, scales = round_root_to_power_of_two(counts[i]), (gradient._scale, *others[i])
            gradients[i] = make_scaled_result(values[i], scales, storage, source.dtype, sum_scale, 1 / sum_scale)
    return tuple(gradients)


def _count_convolution_terms(weight: Tensor, transposed: bool, groups: int, of_output: bool) -> int:
    """Return how many products an element of the output, or of the input's gradient, sums."""
    window = math.prod(weight.shape[2:])
    # A weight is [out, in / groups, ...], that of a transposed convolution [in, out / groups, ...].
    if transposed == of_output:
        return weight.shape[0] // groups * window
    return weight.shape[1] * window


def fma(a: Any, b: Any, c: Any) -> Tensor:
    """a b + c in c's storage: what dynamo makes of c.addcmul_(x, y, value=b), with a = x y, and of c.addcdiv_."""
    total: Any = add(c, mul(a, b)) if isinstance(b, Tensor) else add(c, a, alpha=b)
    if not isinstance(c, ScaledTensor):
        return total
    if isinstance(b, Tensor) or is_symbolic(b) or not b > 0:
        return fit_payload(get_float32_payload(total), total._scale, c._payload.dtype, total.dtype)
    return round_second_moment_above_zero(total, c, encode_operand(a, c))


RULES_OF_OPERATORS_DEFINED_LATER["prims::fma"] = fma


@implements_each(
    *(aten._linalg_det.default, aten._linalg_slogdet.default, aten._linalg_solve_ex.default), family="linear algebra"
)
def compute_det_or_solution(operator: OpOverload, matrix: Tensor, *arguments: Any, **options: Any) -> tuple:
    """Factor the transpose of a contiguous matrix, as its gradient then takes it to have."""
    values = convert_argument_to_float32(matrix)
    if values.is_contiguous() and not matrix.is_contiguous():
        values = values.mT.contiguous().mT
    holders = [x for x in (matrix, *arguments) if isinstance(x, Tensor)]
    results = operator(values, *map(convert_argument_to_float32, arguments), **options)
    return tuple(encode_results(y, holders) for y in results)


def can_multiply_in_eight_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether two matrices, payloads, are multiplied on eight-bit units."""
    if a.dtype not in EIGHT_BIT_DTYPES or b.dtype not in EIGHT_BIT_DTYPES or a.dtype == b.dtype == torch.float8_e5m2:
        return False
    if eight_bit_engine(a.device) == "emulated":
        return False
    sides = *a.shape, b.shape[1]
    return all(side % EIGHT_BIT_MATRIX_SIDE_MULTIPLE == 0 and side > 0 for side in sides)


def multiply_eight_bit_matrices(a: Tensor, b: Tensor, factor: float) -> Tensor:
    """Return factor a b in float32 by torch._scaled_mm, which takes contiguous rows of a and columns of b."""
    a = a if a.stride(1) == 1 else a.view(torch.uint8).contiguous().view(a.dtype)
    b = b if b.stride(0) == 1 else b.t().view(torch.uint8).contiguous().view(b.dtype).t()
    one, other = (torch.full((), x, dtype=torch.float32, device=a.device) for x in (1.0, factor))
    return torch._scaled_mm(a, b, scale_a=one, scale_b=other, out_dtype=torch.float32)
