"""MCTensor: a torch tensor whose value is the sum of several components, times a scale."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn, SupportsIndex

import torch
from torch import Tensor
from torch._ops import OpOverload

from ..arithmetic import PRECISION_BY_DTYPE, Parts, compare, merge
from ..kernels import define_operator, hide_own_frames_from_compiler, is_under_transform, list_present_operators
from ..subclass._composite_tensor import (
    CompositeTensor,
    check_pickled_layout,
    get_autograd_flags,
    refuse_mixed_classes,
    restore_autograd_flags,
)
from ..subclass._in_backward import (
    COMPONENTS_GRADIENTS_MODE,
    FIRST_GRADIENTS_MODE,
    check_gradients_mode,
    make_differentiable,
    refuse_jit_trace,
    refuse_make_fx,
)
from ..subclass._rule_table import RuleTable, RuleType
from ._encode import (
    canonicalize_components,
    convert_components_to_float64,
    encode_into_components,
    format_tensor,
    format_values,
)

_rule_table = RuleTable()
RULES = _rule_table.rules
find_rule = _rule_table.find_rule
register_derivation = _rule_table.register_derivation


def implements(*operators: OpOverload) -> Callable[[RuleType], RuleType]:
    """Register a function as the rule of torch operators for MCTensors, as a decorator.

    The function takes the operator's own arguments, runs below autograd, and returns what the operator returns.

    Args:
        operators: overloads such as `torch.ops.aten.erfc.default` or `torch.ops.mylib.smooth.default`.

    Raises:
        TypeError: an argument is not one overload of an operator.
        ValueError: an operator has a rule already.

    >>> import torch
    >>> from halfulp.mctensor import MCTensor
    >>> _ = torch.library.define("halfulp_doc::twice", "(Tensor x) -> Tensor")
    >>> @MCTensor.implements(torch.ops.halfulp_doc.twice.default)
    ... def twice(x):
    ...     return x + x
    >>> torch.ops.halfulp_doc.twice(MCTensor.encode("0.1")).to_strings()
    '0.20000000000000'
    """
    return _rule_table.implements(*operators)


def implements_each(*operators: OpOverload) -> Callable[[RuleType], RuleType]:
    """Register a function of an operator and its arguments as the rule of each of some operators, as a decorator."""

    def register(rule: RuleType) -> RuleType:
        for operator in list_present_operators(operators):
            implements(operator)(functools.partial(rule, operator))
        return rule

    return register


def attach_autograd_history(x: Tensor, made: Any) -> Any:
    """Return an encoded MCTensor with autograd's history, forward tangents included, back to x."""
    transformed = is_under_transform()
    if not transformed and not (x.requires_grad and torch.is_grad_enabled()):
        return made
    chosen: type[torch.autograd.Function] = _ForwardModeEncodeFunction if transformed else _EncodeFunction
    connect: Callable[..., Any] = chosen.apply
    return connect(x, made)


class _EncodeFunction(torch.autograd.Function):
    """Connect an MCTensor to the graph of the tensor that it encodes."""

    @staticmethod
    def forward(context: Any, x: Tensor, made: Any) -> Tensor:
        context.made = type(made)
        context.dtype = None if isinstance(x, context.made) else x.dtype
        context.form = len(made._parts), made.dtype, "none" if made._scale is None else "auto", made._gradients
        detached: Tensor = made.detach()
        return detached

    @staticmethod
    @hide_own_frames_from_compiler
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if context.dtype is None:
            return gradient, None
        return (gradient.decode(context.dtype) if hasattr(gradient, "decode") else gradient.to(context.dtype)), None


# Dynamo refuses Functions with a jvp: those are chosen only where one is needed.
class _ForwardModeEncodeFunction(_EncodeFunction):
    """The same in forward mode."""

    @staticmethod
    def jvp(context: Any, tangent: Tensor, *_: object) -> Tensor:
        components, dtype, scale, gradients = context.form
        made: Tensor = context.made.encode(tangent, components, dtype, scale, gradients=gradients)
        return made


def _save_for_decoding_gradient(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ctx.target = inputs
    ctx.kind, ctx.decoded = x.dtype, type(x)
    ctx.count = len(x._parts) if hasattr(x, "_parts") and x._gradients == COMPONENTS_GRADIENTS_MODE else 0


@hide_own_frames_from_compiler
def _compute_decoding_gradient(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
    """Return the gradient of a decoded tensor, with components where it keeps such gradients."""
    if not context.count or isinstance(gradient, context.decoded):
        return gradient.to(context.kind), None
    return context.decoded.encode(gradient, context.count, context.kind, gradients=COMPONENTS_GRADIENTS_MODE), None


_make_wrapper = torch.Tensor._make_wrapper_subclass
_data_descriptor: Any = torch._C.TensorBase.data  # a descriptor, which torch types as its value
# Of what pickle stores; a file of another layout is refused.
PICKLED_LAYOUT_VERSION = 1

# A dispatch key above autograd's of which torch's operators have no kernel: see entry. torch left it to
# extensions, of which the one that used it is no longer maintained.
ENTRY_DISPATCH_KEY_NAME = "DeferredInit"
ENTRY_DISPATCH_KEY = torch._C._dispatch_key_parse(ENTRY_DISPATCH_KEY_NAME)
_entry_dispatch_key_set = torch._C.DispatchKeySet(ENTRY_DISPATCH_KEY)
_fallthrough_library = torch.library.Library("_", "IMPL")
try:
    _fallthrough_library.fallback(torch.library.fallthrough_kernel, ENTRY_DISPATCH_KEY_NAME)
except RuntimeError as error:
    raise ImportError(
        f"another library in this process has the dispatch key {ENTRY_DISPATCH_KEY_NAME}, which torch has one of: "
        "use halfulp.mctensor and that library in processes of their own"
    ) from error


class MCTensor(CompositeTensor):
    """A tensor whose value is scale * (c[0] + c[1] + ...), with one to four components of one narrow format.

    From "MCTensor: A High-Precision Deep Learning Library with Multi-Component Floating-Point" (Yu, Guo, Li, Yuan and
    De Sa, arXiv 2207.08867). The components c[i] are plain tensors, largest first, each at most half an ulp of the one
    before; the scale is a power of two, or None. It is a torch.Tensor of the components' dtype: modules, autograd,
    optimizers and torch.compile take it as it is. Make one by `encode` or `from_components`.

    Results take the dtype that torch.promote_types gives the components' dtypes (Python numbers and tensors without
    dimensions leave it as it is) and the larger number of components; Python numbers enter with all 53 bits.
    Comparisons are by value. Overflow gives infinity, as torch does. Writing in place changes what all views share: a
    scale is adapted to the result; where there is none, values beyond float16's range, and those that `copy_` and
    indexed assignment would make infinite, raise and nothing is written. A plain tensor that is written into takes the
    value rounded once. `x.to(dtype)` changes the components' dtype and keeps their number; `decode` leaves MCTensors.

    Gradients are plain tensors of the components' dtype (`gradients="first"`, as in the paper), or MCTensors
    (`gradients="components"`); results inherit it, "components" winning.

    >>> import torch
    >>> third = MCTensor.encode("1", dtype=torch.float32) / 3
    >>> third
    MCTensor(0.33333333333333, components=2, dtype=torch.float32)
    >>> float(third.decode() - 1 / 3) < 2**-50
    True
    """

    _parts: Parts
    _scale: Tensor | None
    _gradients: str
    # Whether ones_like made it: a backward pass begins with such a tensor, which is a gradient then.
    _is_filled_with_ones = False

    _value_description = "a sum of components"
    _parts_expression = "each of x.components"
    _value_attributes = ("_parts", "_scale", "_gradients")

    def __new__(cls, *arguments: object, **options: object) -> MCTensor:
        raise TypeError("make an MCTensor by MCTensor.encode(values) or MCTensor.from_components(tensors)")

    @classmethod
    @hide_own_frames_from_compiler
    def __torch_dispatch__(  # type: ignore[override]
        cls, operator: Any, types: Any, arguments: tuple[Any, ...] = (), options: dict[str, Any] | None = None
    ) -> Any:
        refuse_make_fx("MCTensor")
        if len(types) > 1:
            refuse_mixed_classes(operator, types)
        return find_rule(operator)(*arguments, **(options or {}))

    @staticmethod
    def encode(
        x: Any,
        components: int = 2,
        dtype: torch.dtype | None = None,
        scale: Tensor | float | str | None = None,
        *,
        gradients: str = FIRST_GRADIENTS_MODE,
        device: torch.device | str | None = None,
    ) -> MCTensor:
        """Encode values as a sum of components, with every digit that fits.

        Args:
            x: a tensor of float16, bfloat16, float32 or float64, an MCTensor, a NumPy array of those, a number, a
                string ("0.1", "1e-30"), a Fraction, a Decimal, an mpmath number, or nested lists of these.
            components: 1 to 4.
            dtype: of the components; x's own, or the default dtype for numbers.
            scale: a power of two, "auto" (from the largest magnitude), "none", or None: automatic for float16, whose
                components would end at 2^-24, and none for the others.
            gradients: "first" or "components", see the class.
            device: of the components; x's own, or the CPU.

        Returns:
            An MCTensor of x's shape. Gradients flow back to a tensor x.

        Raises:
            ValueError: components not in 1 to 4, integer or complex data, a dtype that is none of the four, a scale
                that is no power of two, or a value out of the components' range.

        >>> import torch
        >>> MCTensor.encode(["0.1", "1e-30"], components=3, dtype=torch.bfloat16).components[0].shape
        torch.Size([2])
        """
        check_gradients_mode(gradients)
        if isinstance(x, Tensor):
            refuse_make_fx("MCTensor")
            refuse_jit_trace("MCTensor")
        source = x.detach() if isinstance(x, Tensor) else x
        parts, held = encode_into_components(source, components, dtype, scale, device)
        made = wrap_components(parts, held, gradients)
        connected: MCTensor = attach_autograd_history(x, made) if isinstance(x, Tensor) else made
        return connected

    @staticmethod
    def from_components(
        components: Parts | list[Tensor],
        scale: Tensor | float | str | None = None,
        *,
        gradients: str = FIRST_GRADIENTS_MODE,
    ) -> MCTensor:
        """Return the sum of plain tensors of one dtype as as many components, with |next| <= ulp(previous) / 2.

        Args:
            components: one to four tensors of one dtype, in any order and overlapping or not; shapes broadcast.
            scale: that the sum is to be multiplied by, a power of two; None or "none" for one without.
            gradients: "first" or "components".

        Raises:
            ValueError: no tensor or more than four, several dtypes, integer or complex data.

        >>> import torch
        >>> MCTensor.from_components([torch.tensor(1.0), torch.tensor(2.0**-24), torch.tensor(1.0)]).components
        (tensor(2.), tensor(5.9605e-08), tensor(0.))
        """
        check_gradients_mode(gradients)
        parts, held = canonicalize_components(components, scale)
        return wrap_components(parts, held, gradients)

    @staticmethod
    def implements(*operators: Any) -> Callable[[RuleType], RuleType]:
        """Register a function as the rule of torch operators, as a decorator: see `halfulp.mctensor.implements`."""
        return implements(*operators)

    @property
    def components(self) -> Parts:
        """The components, largest first: plain tensors that share this tensor's memory."""
        return self._parts

    @property
    def scale(self) -> Tensor | None:
        """The scale of the components' sum: a float32 power of two without dimensions, or None."""
        return self._scale

    # torch's distributed checkpoints look up every entry of a state_dict as an attribute.
    component_scale = scale
    component_1: property = property(lambda self: self.components[1])
    component_2: property = property(lambda self: self.components[2])
    component_3: property = property(lambda self: self.components[3])

    @property
    def gradients(self) -> str:
        """The kind of gradients kept: "first" or "components"."""
        return self._gradients

    def decode(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """Return the value as a plain tensor, rounded once; gradients flow through it.

        >>> import torch
        >>> MCTensor.encode(0.1, dtype=torch.bfloat16, components=3).decode(torch.float32)
        tensor(0.1000)
        """
        plain: Tensor = _differentiable_decode(self, dtype)
        return plain

    def with_gradients(self, gradients: str) -> MCTensor:
        """Return a leaf of the same components, sharing memory, that keeps gradients of another kind."""
        check_gradients_mode(gradients)
        made = wrap_components(self._parts, self._scale, gradients)
        made.requires_grad_(self.requires_grad)
        return made

    def to_strings(self, digits: int | None = None) -> str | list[Any]:
        """Return the values as decimal strings, in nested lists of the tensor's shape.

        Args:
            digits: significant ones, correctly rounded; as many as the components hold.

        >>> MCTensor.encode(["0.1", "2e5"]).to_strings(5)
        ['0.10000', '2.0000e+5']
        """
        return format_values(self._parts, self._scale, digits)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return format_tensor(self, self._parts, self._scale, self._gradients)

    def new_tensor(  # type: ignore[override]
        self, data: Any, *, dtype: torch.dtype | None = None, device: Any = None, requires_grad: bool = False
    ) -> Tensor:
        """Return data with all digits as an MCTensor like this one, or as a plain tensor for another kind of dtype."""
        kind, place = dtype or self.dtype, device or self.device
        if kind not in PRECISION_BY_DTYPE:
            plain = data.decode() if hasattr(data, "decode") else data
            return torch.tensor(plain, dtype=kind, device=place, requires_grad=requires_grad)
        if isinstance(data, Tensor):
            data = data.detach() if data.is_floating_point() else data.double()
        scale = "none" if self._scale is None else "auto"
        made = wrap_components(*encode_into_components(data, len(self._parts), kind, scale, place), self._gradients)
        return made.requires_grad_(requires_grad)

    def new(self, *arguments: Any, **options: Any) -> NoReturn:
        """Refuse torch's old constructor."""
        raise TypeError("x.new is of sizes or of data: use x.new_empty(sizes) or x.new_tensor(data)")

    def __setitem__(self, index: Any, value: Any) -> None:
        # torch would round a number to the components' dtype before anyone else sees it.
        super().__setitem__(
            index, torch.tensor(value, dtype=torch.float64, device="cpu") if isinstance(value, (int, float)) else value
        )

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        marks = get_autograd_flags(self)
        # All detached: plain pickle joins tensors that are one object, and would give views apart one scale.
        parts, scale = tuple(part.detach() for part in self._parts), self._scale
        fields = parts, None if scale is None else scale.detach(), self._gradients
        return rebuild_mctensor, (PICKLED_LAYOUT_VERSION, *fields, *marks)

    @property
    def data(self) -> Tensor:
        """The same components without history; assigning replaces the components."""
        detached: Tensor = _data_descriptor.__get__(self)
        return detached

    @data.setter
    def data(self, value: Tensor) -> None:
        if not isinstance(value, MCTensor):
            raise TypeError("x.data of an MCTensor takes an MCTensor: write values with x.copy_(tensor) under no_grad")
        _data_descriptor.__set__(self, value)
        self._parts, self._scale, self._gradients = value._parts, value._scale, value._gradients

    def _list_plain_tensors(self) -> list[Tensor]:
        return [*self._parts, *([] if self._scale is None else [self._scale])]

    def _rebuild_like(self, inner: list[Tensor], requires_grad: bool) -> MCTensor:
        count = len(self._parts)
        made = wrap_components(tuple(inner[:count]), None if self._scale is None else inner[count], self._gradients)
        made.requires_grad_(requires_grad)
        return made

    def _replace_by_views(self, view: Callable[[Tensor], Tensor]) -> None:
        self._parts = tuple(map(view, self._parts))

    # A compiler reads and replaces the components by name.
    _part_0, _part_1, _part_2, _part_3 = (
        property(
            hide_own_frames_from_compiler(lambda self, i=i: self._parts[i]),
            hide_own_frames_from_compiler(
                lambda self, part, i=i: setattr(self, "_parts", (*self._parts[:i], part, *self._parts[i + 1 :]))
            ),
        )
        for i in range(4)
    )

    @hide_own_frames_from_compiler
    def __tensor_flatten__(self) -> tuple[list[str], tuple[str, int, bool]]:
        names = [f"_part_{i}" for i in range(len(self._parts))]
        scaled = self._scale is not None
        return names + (["_scale"] if scaled else []), (self._gradients, len(self._parts), scaled)

    @staticmethod
    @hide_own_frames_from_compiler
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context: tuple[str, int, bool], size: Any, stride: Any
    ) -> MCTensor:
        return wrap_components(tuple(inner[f"_part_{i}"] for i in range(context[1])), inner.get("_scale"), context[0])

    @staticmethod
    def _from_plain_tangent(x: Tensor, context: tuple[str, int, bool]) -> MCTensor:
        gradients, components, scaled = context
        return MCTensor.encode(x.detach(), components, x.dtype, "auto" if scaled else "none", gradients=gradients)

    @hide_own_frames_from_compiler
    def __coerce_tangent_metadata__(self) -> MCTensor:
        return (
            wrap_components((round_to_plain(self),), None, FIRST_GRADIENTS_MODE)
            if self._gradients == FIRST_GRADIENTS_MODE
            else self
        )

    @hide_own_frames_from_compiler
    def __coerce_same_metadata_as_tangent__(self, context: Any, expected: Any = None) -> Tensor | None:
        if expected is torch.Tensor:
            return round_to_plain(self)
        return self._from_plain_tangent(self, context) if expected in (None, MCTensor) else None


@hide_own_frames_from_compiler
def wrap_components(parts: Parts, scale: Tensor | None, gradients: str) -> MCTensor:
    """Make an MCTensor over components of equal shape and strides, without copying or checking."""
    first = parts[0]
    shape, strides, offset = first.shape, first.stride(), first.storage_offset()
    dtype, device = first.dtype, first.device
    made = _make_wrapper(
        MCTensor, shape, strides, offset, dtype=dtype, device=device, _extra_dispatch_keys=_entry_dispatch_key_set
    )
    made._parts = parts
    made._scale = scale
    made._gradients = gradients
    return made


def rebuild_mctensor(
    layout: int, parts: Parts, scale: Tensor | None, gradients: str, requires_grad: bool, is_parameter: bool
) -> MCTensor:
    """Make the tensor that `__reduce_ex__` stored; files of torch.save hold this function's name."""
    check_pickled_layout(layout, PICKLED_LAYOUT_VERSION, "MCTensor", "x.components and x.scale")
    return restore_autograd_flags(wrap_components(tuple(parts), scale, gradients), requires_grad, is_parameter)


def decode_to_plain(x: MCTensor, dtype: torch.dtype) -> Tensor:
    """Return the value as a plain tensor of a floating-point dtype, rounded once."""
    parts = x._parts if x._scale is None else convert_components_to_float64(x._parts, x._scale)
    if dtype.is_floating_point and dtype not in PRECISION_BY_DTYPE:
        return _round_to_odd_float32(parts).to(dtype)
    if x._scale is not None and len(parts) == 1 and dtype == torch.float64:
        return parts[0]
    return merge(parts, dtype)


def _round_to_odd_float32(parts: Parts) -> Tensor:
    """Return a sum as float32 that are odd where it lies between two: rounded again, they give the sum rounded once."""
    near = merge(parts, torch.float32)
    side = compare(parts, (near,))
    odd = torch.nextafter(near, torch.full_like(near, torch.inf).copysign(side))
    return torch.where((side.abs() == 1) & (near.view(torch.int32) % 2 == 0), odd, near)


def round_to_plain(x: MCTensor) -> Tensor:
    """Return the value rounded to a plain tensor of the components' dtype: a gradient in the mode "first"."""
    return x._parts[0] if x._scale is None else decode_to_plain(x, x.dtype)


torch.serialization.add_safe_globals([rebuild_mctensor])


_decode_operator = define_operator(
    "decode(Tensor x, ScalarType dtype) -> Tensor",
    lambda x, dtype: x.to(dtype, copy=True),
    lambda x, dtype: torch.empty_like(x, dtype=dtype),
)


implements(_decode_operator)(decode_to_plain)


def _decode_tangent(context: Any, tangent: Tensor, *_: object) -> Tensor:
    return tangent.decode(context.target) if hasattr(tangent, "decode") else tangent.to(context.target)


_differentiable_decode = make_differentiable(
    _decode_operator, _save_for_decoding_gradient, _compute_decoding_gradient, _decode_tangent
)
