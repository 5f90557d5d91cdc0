"""ScaledTensor: a torch tensor whose value is a narrow payload times a power of two."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, SupportsIndex

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from ..kernels import hide_own_frames_from_compiler, require_float64, to_plain_memory_unless_traced
from ..subclass._composite_tensor import (
    CompositeTensor,
    check_pickled_layout,
    get_autograd_flags,
    refuse_mixed_classes,
    restore_autograd_flags,
)
from ..subclass._in_backward import refuse_make_fx
from ..subclass._rule_table import RuleType, is_in_quotient_formula
from . import _fused as fused
from . import _powers_of_two as _powers
from ._registry import (
    EIGHT_BIT_DTYPES,
    FULL_RANGE_STORAGES,
    LOGICAL_DTYPES,
    ComplexOperandError,
    check_home_dtype,
    check_logical_dtype,
    check_storage_dtype,
    find_rule,
    find_rule_with_home,
    implements,
)

# The logical dtype, the storage (None of plain tensors) and the home.
DtypeStorageAndHome = tuple[torch.dtype, Any, torch.dtype | None]

_make_wrapper_subclass = torch.Tensor._make_wrapper_subclass
# Of what pickle stores; a file of another layout is refused.
PICKLE_LAYOUT_VERSION = 1
_DATA_DESCRIPTOR: Any = torch._C.TensorBase.data  # a descriptor, which torch types as its value


class ScaledTensor(CompositeTensor):
    """A tensor whose value is payload x scale: the payload a tensor of a narrow dtype, the scale one power of two.

    From "Scalify: scale propagation for efficient low-precision LLM training" (Balança, Hosegood, Luschi and
    Fitzgibbon, arXiv 2407.17353). Every operator has a rule that gives the payload and the scale of its result; in
    full precision results are what they would be without scales. `x.dtype`, which modules and autograd see, is the
    logical dtype; the payload's own is the storage dtype, `x.payload.dtype`: float16, bfloat16, float8_e4m3fn,
    float8_e5m2 or float32. `x.to(dtype)` changes the logical dtype; `cast_` the storage.

    Plain tensors and Python numbers that meet a scaled tensor are encoded with a float32 payload and do not widen the
    result's. Rules compute in float32 and round once. Finite results beyond the payload's range take a larger scale
    where values can be looked at (eagerly, on a CPU), and else saturate; infinities and NaN stay. Zeros made by
    torch.zeros_like take any scale: that of what is written or added first.

    >>> import torch
    >>> x = ScaledTensor.encode(torch.tensor([3e-9, 4e-9]), dtype=torch.float16)
    >>> x
    ScaledTensor([2.9995e-09, 4.0018e-09], scale=2^-28, payload=torch.float16)
    >>> x.payload, x.dtype
    (tensor([0.8052, 1.0742], dtype=torch.float16), torch.float32)
    """

    _payload: Tensor
    _scale: Tensor
    _home: torch.dtype | None = None
    # Its version since `full_like` or `new_full` filled it with one large number; views share it.
    _large_fill_version: int | None = None

    _value_description = "a payload with a scale"
    _parts_expression = "x.payload and x.scale"
    _value_attributes = ("_payload", "_scale", "_home")

    def __new__(
        cls, payload: Tensor, scale: Tensor | float, dtype: torch.dtype = torch.float32, home: torch.dtype | None = None
    ) -> ScaledTensor:
        """Make a tensor of a payload and a scale as they are: nothing is measured or rounded.

        Args:
            payload: of a storage dtype.
            scale: a power of two from 2^-126 to 2^127.
            dtype: the logical one.
            home: see `home`.

        Raises:
            ValueError: the payload's dtype is no storage dtype, the scale no power of two, or another home.
        """
        if not isinstance(payload, Tensor) or isinstance(payload, ScaledTensor):
            raise TypeError(f"a payload is a plain tensor, got {type(payload).__name__}: use ScaledTensor.encode(x)")
        check_storage_dtype(payload.dtype)
        require_float64(payload.device, "ScaledTensors")
        check_logical_dtype(dtype)
        check_home_dtype(home)
        return wrap_payload(
            to_plain_memory_unless_traced(payload.detach(), "a payload"),
            _powers.make_scale(scale, payload.device),
            dtype,
            home,
        )

    @classmethod
    @hide_own_frames_from_compiler
    def __torch_dispatch__(  # type: ignore[override]
        cls, operator: Any, types: Any, arguments: tuple[Any, ...] = (), options: dict[str, Any] | None = None
    ) -> Any:
        if torch._C._len_torch_dispatch_stack():
            refuse_make_fx("ScaledTensor")
        if len(types) > 1:
            refuse_mixed_classes(operator, types)
        try:
            home = find_home_of_arguments(arguments, options)
            if home is not None or is_in_quotient_formula():
                return find_rule_with_home(operator)(home, arguments, options or {})
            return find_rule(operator)(*arguments, **(options or {}))
        except ComplexOperandError:
            # On values, with plain results: complex numbers carry no scale.
            with keep_lazy_conjugates():
                return operator(*tree_map(decode_if_scaled, arguments), **tree_map(decode_if_scaled, options or {}))
        except (NotImplementedError, RuntimeError):
            # In place of torch's error, if an operator takes or makes tensors that are not dense.
            takes = any(isinstance(x, Tensor) and x.layout != torch.strided for x in tree_leaves((arguments, options)))
            if not takes and "sparse" not in operator._schema.name:
                raise
            raise NotImplementedError(
                f"{operator} with a sparse layout: scaled tensors are dense, use x.decode()"
            ) from None

    @staticmethod
    def encode(
        x: Tensor,
        dtype: torch.dtype = torch.float16,
        scale: Tensor | float | None = None,
        home: torch.dtype | None = None,
    ) -> ScaledTensor:
        """Encode a plain tensor as payload x scale.

        Scales end at 2^-126: values below that times the payload's smallest number, as float64 has them, become 0.

        Args:
            x: float16, bfloat16, float32 or float64; its dtype becomes the logical one.
            dtype: of the payload: float16, bfloat16, float8_e4m3fn, float8_e5m2 or float32.
            scale: a power of two; None takes one next to the root mean square of the finite non-zero values, or as
                much larger as the largest needs.
            home: see `home`.

        Returns:
            A ScaledTensor of x's shape; gradients flow back to x.

        Raises:
            TypeError: x is no tensor.
            ValueError: integer or complex data, no storage dtype, a scale that is no power of two, another home, or a
                finite value that does not fit the payload under the scale, or under any.

        >>> import torch
        >>> ScaledTensor.encode(torch.tensor([1e-6, 3e-6]), torch.float8_e4m3fn).scale.log2()
        tensor(-19.)
        """
        if not isinstance(x, Tensor):
            raise TypeError(f"x is a torch.Tensor, got {type(x).__name__}: torch.as_tensor makes one")
        refuse_make_fx("ScaledTensor")
        check_storage_dtype(dtype)
        check_home_dtype(home)
        if x.dtype not in LOGICAL_DTYPES:
            raise ValueError(
                f"x is {x.dtype}: allowed are {', '.join(map(str, LOGICAL_DTYPES))}; integers carry no scale"
            )
        if x.layout != torch.strided:
            raise ValueError(f"x has layout {x.layout}: a scaled tensor is dense, x.to_dense()")
        require_float64(x.device, "ScaledTensors")
        if hasattr(x, "decode"):  # a ScaledTensor or an MCTensor
            x = x.decode(x.dtype)
        given = None if scale is None else _powers.make_scale(scale, x.device)
        made: ScaledTensor = apply_conversion(x, _encode_tensor, (x.dtype, dtype, home), dtype, given, home)
        return made

    @staticmethod
    def implements(*operators: Any) -> Callable[[RuleType], RuleType]:
        """Register a function as the rule of torch operators, as a decorator: see `halfulp.scaled.implements`."""
        return implements(*operators)

    @property
    def payload(self) -> Tensor:
        """The payload, which the scale multiplies: a plain tensor that shares this tensor's memory."""
        return self._payload

    @property
    def scale(self) -> Tensor:
        """The scale, a power of two: a float32 tensor without dimensions."""
        return self._scale

    @property
    def home(self) -> torch.dtype | None:
        """The storage to which products round their results, float16 or bfloat16; None if operators keep the storage.

        With a home, results of the operators that torch.autocast computes in float32 (exp, log, pow, sums, softmax,
        losses) have a float32 payload, and so has what further pointwise operators make of them; matrix products,
        convolutions, attention, embeddings and recurrent layers round their operands to the home again, under measured
        scales, as do parameters what accumulates in their gradients.

        >>> import torch
        >>> x = ScaledTensor.encode(torch.tensor([[1.0, 2.0]]), torch.float16, home=torch.float16)
        >>> x.exp().payload.dtype, (x.exp() * x).payload.dtype, (x.exp() @ x.mT).payload.dtype
        (torch.float32, torch.float32, torch.float16)
        """
        return self._home

    # torch's distributed checkpoints look up every entry of a state_dict as an attribute of the module or tensor.
    payload_scale = scale

    def with_scale(self, scale: Tensor | float) -> ScaledTensor:
        """Return the same values under another scale; finite payloads beyond the storage's range saturate."""
        made: ScaledTensor = apply_conversion(self, move_to_scale, None, _powers.make_scale(scale, self.device))
        return made

    def decode(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the value as a plain tensor, rounded once to the logical dtype or another; gradients flow through it.

        >>> import torch
        >>> ScaledTensor(torch.tensor([1.0, 1.5]), 2.0**-3).decode()
        tensor([0.1250, 0.1875])
        """
        target = dtype or self.dtype
        plain: Tensor = apply_conversion(self, _decode_tensor, (target, None, None), target)
        return plain

    def cast_(self, dtype: torch.dtype) -> ScaledTensor:
        """Change the payload's dtype in place: round the values once, keep the scale."""
        check_storage_dtype(dtype)
        self._payload = round_to_storage(get_float32_payload(self), dtype)
        return self

    def _list_plain_tensors(self) -> list[Tensor]:
        return [self._payload, self._scale]

    def _rebuild_like(self, inner: list[Tensor], requires_grad: bool) -> ScaledTensor:
        payload, scale = inner
        return wrap_payload(payload, scale, self.dtype, self._home, requires_grad)

    def _replace_by_views(self, view: Callable[[Tensor], Tensor]) -> None:
        self._payload = view(self._payload)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        payload, scale = self._payload, self._scale
        if type(payload) is not Tensor or payload.is_meta:
            return f"ScaledTensor(shape={list(self.shape)}, payload={payload.dtype}, device={self.device})"
        with torch.no_grad():
            text = repr(decode_values(self.detach(), torch.float32))
        text = text.removeprefix("tensor(").removesuffix(")").replace("\n       ", "\n             ")
        words = [text.split(", dtype=")[0], f"scale=2^{round(math.log2(scale.item()))}", f"payload={payload.dtype}"]
        if self.dtype != torch.float32:
            words.append(f"dtype={self.dtype}")
        if self.requires_grad:
            words.append("requires_grad=True")
        return f"ScaledTensor({', '.join(words)})"

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        payload, marks = self._payload.detach(), get_autograd_flags(self)
        # torch.load has no storage class for eight-bit floats.
        stored = payload.view(torch.uint8) if payload.element_size() == 1 else payload
        home = () if self._home is None else (self._home,)
        # Detached too: plain pickle joins tensors that are one object, and would give views apart one scale.
        fields = stored, payload.dtype, self._scale.detach(), self.dtype
        return rebuild_scaled_tensor, (PICKLE_LAYOUT_VERSION, *fields, *marks, *home)

    @property
    def data(self) -> Tensor:
        """The same payload and scale without history; assigning replaces both.

        A plain floating tensor is encoded: in the same storage and logical dtype, under a measured scale.

        >>> import torch
        >>> x = ScaledTensor.encode(torch.ones(2))
        >>> x.data = torch.tensor([0.125, 0.25, 0.5])
        >>> x
        ScaledTensor([0.1250, 0.2500, 0.5000], scale=2^-2, payload=torch.float16)
        """
        detached: Tensor = _DATA_DESCRIPTOR.__get__(self)
        return detached

    @data.setter
    def data(self, value: Tensor) -> None:
        if isinstance(value, ScaledTensor):
            held = value
        elif isinstance(value, Tensor) and type(value.data) is Tensor:
            made = ScaledTensor.encode(value.detach(), self._payload.dtype)
            held = wrap_payload(made._payload, made._scale, self.dtype, self._home)
        else:
            raise TypeError(f"x.data of a ScaledTensor takes a ScaledTensor or a plain one, got {type(value).__name__}")
        _DATA_DESCRIPTOR.__set__(self, held)
        self._payload, self._scale = held._payload, held._scale
        self._large_fill_version = None

    @hide_own_frames_from_compiler
    def __tensor_flatten__(self) -> tuple[list[str], DtypeStorageAndHome]:
        # The payload's dtype too: a compiled backward reads a gradient's memory as the dtype that it was traced with.
        return ["_payload", "_scale"], (self.dtype, self._payload.dtype, self._home)

    @staticmethod
    @hide_own_frames_from_compiler
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context: DtypeStorageAndHome, size: Any, stride: Any
    ) -> ScaledTensor:
        return wrap_payload(inner["_payload"], inner["_scale"], context[0], context[2])

    @staticmethod
    def _from_plain_tangent(x: Tensor, context: DtypeStorageAndHome) -> ScaledTensor:
        dtype, storage, home = context
        made = ScaledTensor.encode(x, storage)
        return wrap_payload(made._payload, made._scale, dtype, home)

    @hide_own_frames_from_compiler
    def __coerce_same_metadata_as_tangent__(self, context: Any, expected: type | None = None) -> Tensor | None:
        if expected is torch.Tensor:
            return self.detach().decode()
        if expected not in (None, ScaledTensor):
            return None
        return convert_storage_and_dtype(self.detach(), *context)


@hide_own_frames_from_compiler
def wrap_payload(
    payload: Tensor, scale: Tensor, dtype: torch.dtype, home: torch.dtype | None = None, requires_grad: bool = False
) -> ScaledTensor:
    """Return payload x scale as a ScaledTensor, unchecked. Rules leave the home to their caller."""
    made = _make_wrapper_subclass(
        ScaledTensor,
        payload.shape,
        payload.stride(),
        payload.storage_offset(),
        dtype=dtype,
        device=payload.device,
        requires_grad=requires_grad,
    )
    made._payload = payload
    made._scale = scale
    if home is not None:
        made._home = home
    return made


def find_home_of_arguments(arguments: Iterable[Any], options: dict[str, Any] | None) -> torch.dtype | None:
    """Return the home of the first argument that has one, in lists too."""
    for x in arguments:
        kind = type(x)
        if kind is ScaledTensor:
            home: torch.dtype | None = x._home
            if home is not None:
                return home
        elif (kind is list or kind is tuple) and (home := find_home_of_arguments(x, None)) is not None:
            return home
    return find_home_of_arguments(options.values(), None) if options else None


def decode_if_scaled(x: Any) -> Any:
    """Return a scaled tensor's values in its logical dtype, and anything else unchanged."""
    return decode_values(x) if isinstance(x, ScaledTensor) else x


def move_to_scale(x: ScaledTensor, scale: Tensor) -> ScaledTensor:
    """Return the same values under another scale, in the same storage."""
    payload = _powers.multiply_by_power(get_float32_payload(x), _powers.divide_scales(x._scale, scale))
    return wrap_payload(round_to_storage(payload, x._payload.dtype), scale.clone(), x.dtype, x._home)


def keep_lazy_conjugates() -> AbstractContextManager[Any]:
    """Let torch see, inside a rule too, that a complex tensor is still to be conjugated or negated."""
    # Below autograd torch leaves out what does so, as its own kernels have no such operands; formulas of several
    # operators make them, and their results would silently be wrong.
    include, exclude = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    for key in (torch._C.DispatchKey.Conjugate, torch._C.DispatchKey.Negative, torch._C.DispatchKey.ZeroTensor):
        exclude = exclude.remove(key)
    return torch._C._ForceDispatchKeyGuard(include, exclude)


def convert_storage_and_dtype(
    x: ScaledTensor, dtype: torch.dtype, storage: torch.dtype, home: torch.dtype | None = None
) -> ScaledTensor:
    """Return the values in another logical dtype and storage, under a measured scale if the storage is narrower."""
    if choose_widest_storage((x._payload.dtype, storage)) == storage:
        return wrap_payload(round_to_storage(get_float32_payload(x), storage), x._scale, dtype, home)
    payload = get_float32_payload(x)
    level = measure_rms_scale(payload, storage)
    scale, rest = _powers.multiply_scales(x._scale, level)
    return wrap_payload(round_to_storage(_powers.multiply_by_power(payload / level, rest), storage), scale, dtype, home)


class _ConvertTensor(torch.autograd.Function):
    """The identity on values, from one kind of tensor to another, as gradients go back and tangents go on."""

    # Arguments: a tensor; a function of it and of the last ones; the result's kind if that is another; these others.

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, function: Callable[..., Tensor], kind: DtypeStorageAndHome | None, *rest: Any) -> Tensor:
        return function(x, *rest)

    @staticmethod
    def setup_context(context: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, _, context.kind, *_ = inputs
        context.others = [None] * (len(inputs) - 1)
        scaled = isinstance(x, ScaledTensor)
        context.kind_of_input = (x.dtype, x._payload.dtype, x._home) if scaled else (x.dtype, None, None)

    @staticmethod
    @hide_own_frames_from_compiler
    def backward(context: Any, gradient: Tensor) -> tuple[Any, ...]:
        return _convert_to_dtype_and_storage(gradient, *context.kind_of_input), *context.others

    @staticmethod
    def jvp(context: Any, tangent: Tensor, *_: None) -> Tensor:
        return tangent.clone() if context.kind is None else _convert_to_dtype_and_storage(tangent, *context.kind)


apply_conversion: Callable[..., Any] = _ConvertTensor.apply


def _convert_to_dtype_and_storage(x: Tensor, dtype: torch.dtype, storage: Any, home: torch.dtype | None) -> Tensor:
    """Return values as a plain tensor, or where there is a storage as a scaled one; a scaled one as it is."""
    if storage is not None:
        return x if isinstance(x, ScaledTensor) else ScaledTensor.encode(x.to(dtype), storage, home=home)
    return x.decode(dtype) if isinstance(x, ScaledTensor) else x.to(dtype)


def _encode_tensor(x: Tensor, storage: torch.dtype, scale: Tensor | None, home: torch.dtype | None) -> ScaledTensor:
    wide = x if x.dtype == torch.float64 else x.to(torch.float32)
    if scale is None:
        scale = measure_rms_scale(x, storage)
    payload = wide / scale.to(wide.dtype)
    _check_payload_range(wide, payload.to(torch.float32), storage, scale)
    return wrap_payload(round_to_storage(payload, storage), scale, x.dtype, home)


def _decode_tensor(x: ScaledTensor, dtype: torch.dtype) -> Tensor:
    value = decode_values(x, dtype)
    return value.clone() if value is x._payload else value


def _check_payload_range(x: Tensor, payload: Tensor, storage: torch.dtype, scale: Tensor) -> None:
    """Raise if a finite value is beyond the payload's range; values that are not concrete saturate instead."""
    if not _powers.has_readable_values(payload) or not payload.numel():
        return
    largest = torch.finfo(storage).max
    if bool(((payload.abs() > largest) & x.isfinite()).any()):
        amax = x[x.isfinite()].abs().max().item()
        is_beyond = amax / largest > _powers.LARGEST_SCALE
        power = _powers.round_number_to_power(amax / largest, "up")
        remedy = "it is beyond what any scale holds" if is_beyond else f"give scale={power:g} or more, or None"
        raise ValueError(
            f"a value of magnitude {amax:g} is out of {storage}'s range under the scale {scale.item():g}: {remedy}"
        )


def rebuild_scaled_tensor(
    version: int,
    stored: Tensor,
    storage: torch.dtype,
    scale: Tensor,
    dtype: torch.dtype,
    requires_grad: bool,
    is_parameter: bool,
    home: torch.dtype | None = None,
) -> ScaledTensor:
    """Return the tensor of which `__reduce_ex__` stored the parts; files of torch.save hold this function's name."""
    check_pickled_layout(version, PICKLE_LAYOUT_VERSION, "ScaledTensor", "x.payload and x.scale")
    return restore_autograd_flags(wrap_payload(stored.view(storage), scale, dtype, home), requires_grad, is_parameter)


torch.serialization.add_safe_globals([rebuild_scaled_tensor])


_WIDTH_RANK_BY_STORAGE = {
    torch.float8_e4m3fn: 0,
    torch.float8_e5m2: 0,
    torch.float16: 1,
    torch.bfloat16: 1,
    torch.float32: 2,
}
# The smallest positive number of a payload type.
SMALLEST_PAYLOAD_NUMBER_BY_STORAGE = {
    storage: torch.finfo(storage).smallest_normal * torch.finfo(storage).eps for storage in _WIDTH_RANK_BY_STORAGE
}
# The largest of n numbers is at most sqrt(n) times their root mean square, and float16 ends at nearly 2^16.
_MAX_ELEMENTS_OF_QUICK_SCALE = 2**30
# Norms whose squares are normal float32 numbers, unless nearly all elements are far smaller.
_ORDINARY_NORM_RANGE = (2.0**-40, 2.0**40)


def choose_widest_storage(storages: Iterable[torch.dtype]) -> torch.dtype:
    """Return the payload type of a result: the wider one, or of two types of one width the next wider one."""
    found = set(storages)
    if len(found) == 1:
        return found.pop()
    width = max(_WIDTH_RANK_BY_STORAGE[storage] for storage in found)
    widest = [storage for storage in found if _WIDTH_RANK_BY_STORAGE[storage] == width]
    if len(widest) == 1:
        return widest[0]
    return torch.float16 if width == 0 else torch.float32


def get_float32_payload(x: ScaledTensor) -> Tensor:
    """Return the payload in float32, in which rules compute."""
    return x._payload if x._payload.dtype == torch.float32 else x._payload.to(torch.float32)


def round_to_storage(values: Tensor, storage: torch.dtype) -> Tensor:
    """Round values once to a payload type; finite ones beyond its range saturate, infinities stay (or become NaN)."""
    if storage == values.dtype:
        return values
    if values.dtype == torch.float64 and storage != torch.float32:
        values = _round_to_odd(values)
    if storage in FULL_RANGE_STORAGES:
        return values.to(storage)
    largest = torch.finfo(storage).max
    if _powers.has_readable_values(values) and values.numel():
        low, high = torch.aminmax(values)
        if -largest <= low.item() and high.item() <= largest:
            return values.to(storage)
    if _powers.has_fused_kernels(values):
        return fused.multiply_payload(values, (), storage, "factor")[0]
    kept = torch.nan if storage == torch.float8_e4m3fn else values  # which has no infinity
    return torch.where(values.isinf(), kept, values.clamp(-largest, largest)).to(storage)


def _round_to_odd(values: Tensor) -> Tensor:
    """Round float64 values to float32 with the last bit 1 where digits were cut off."""
    # Then rounding to 22 bits or fewer makes what it makes of the float64 value (Boldo and Melquiond, IEEE Transactions
    # on Computers 57, 2008), where rounding to float32 first may meet a tie that is none.
    near = values.to(torch.float32)
    cut = torch.where(near.double().abs() > values.abs(), torch.nextafter(near, torch.zeros_like(near)), near)
    odd = (cut.view(torch.int32) | 1).view(torch.float32)
    return torch.where((cut.double() != values) & near.isfinite(), odd, near)


def decode_values(x: ScaledTensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return payload x scale, computed in float32 (float64 for that dtype) and rounded once, by default to x.dtype."""
    dtype = dtype or x.dtype
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    value = _powers.read_scale(x._scale)
    if wide == torch.float32 and x._payload.dtype != wide and _powers.has_fused_kernels(x._payload):
        scaled = fused.multiply_payload(x._payload, (x._scale,), wide, "factor")[0]
        return scaled if dtype == wide else scaled.to(dtype)
    if value is not None and type(x._payload) is Tensor and x._payload.dtype != wide:
        scaled = x._payload.to(wide)  # memory of its own: no second pass for the scale 1, no third tensor for others
        scaled = scaled if value == 1.0 else scaled.mul_(value)
    else:
        scaled = x._payload.to(wide) * (x._scale.to(wide) if value is None else value)
    if value is not None and value >= _powers.HUGE_SCALE and wide == torch.float32:
        # A payload may have been rounded up to 2: float32's largest number then decodes to itself, not to infinity.
        scaled = _powers.clamp_finite_values(scaled, _powers.FLOAT32_MAX, x._payload.to(wide))
    return scaled if dtype == wide else scaled.to(dtype)


def measure_rms_scale(values: Tensor, storage: torch.dtype, scale_of_zeros: float = _powers.SCALE_OF_ZEROS) -> Tensor:
    """Return the power of two next to the root mean square of the finite non-zero values, or what the largest needs."""
    # Without such values `scale_of_zeros`.
    if not values.numel():
        return torch.full((), scale_of_zeros, dtype=torch.float32, device=values.device)
    quick = (
        None if storage in EIGHT_BIT_DTYPES or values.dtype in EIGHT_BIT_DTYPES else _measure_rms_scale_quickly(values)
    )
    if quick is not None:
        return torch.full((), quick, dtype=torch.float32, device="cpu")
    if values.dtype in fused.PAYLOAD_CODEC_BY_DTYPE and _powers.has_fused_kernels(values):
        return fused.measure_rms_scale(values, storage, scale_of_zeros)
    wide = values.detach().to(torch.float64 if values.dtype == torch.float64 else torch.float32)
    finite = torch.nan_to_num(wide, 0.0, 0.0, 0.0)
    amax = finite.abs().amax()
    # Divided by a power of two next to amax, so that no square that matters leaves float32's range.
    near = _powers.round_to_power(amax)
    finite = finite / near
    rms = (finite.square().sum() / finite.count_nonzero().clamp(min=1)).sqrt()
    scale = _powers.round_to_power(near * rms, "nearest")
    least = _powers.round_to_power(amax / torch.finfo(storage).max, "up")
    return torch.where(amax > 0, torch.maximum(scale, least), scale_of_zeros)


def _measure_rms_scale_quickly(values: Tensor) -> float | None:
    """Return the scale of `measure_rms_scale` for ordinary concrete values, in two passes, not eight; else None."""
    if not _powers.has_readable_values(values) or values.dtype == torch.float64 or values.requires_grad:
        return None
    if values.numel() > _MAX_ELEMENTS_OF_QUICK_SCALE:  # one may be beyond float16's range
        return None
    norm = torch.linalg.vector_norm(values, dtype=torch.float32).item()
    if not _ORDINARY_NORM_RANGE[0] < norm < _ORDINARY_NORM_RANGE[1]:  # zeros, infinities, NaN, squares out of range
        return None
    return _powers.round_number_to_power(norm / max(int(values.count_nonzero()), 1) ** 0.5)
