"""ScaledTensor: a torch tensor whose value is a narrow payload times a power of two."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import deepcopy
from typing import TYPE_CHECKING, Any, ClassVar, SupportsIndex

import torch
from torch import Tensor

from ..kernels import require_float64, resolved, untraced
from ..subclass import graph_key
from ..subclass._in_backward import refuse_make_fx
from ..subclass._pickle import register_collate
from ..subclass._rule_table import Given, in_quotient_formula
from ..subclass.models._parameter_holders import refuses_fully_shard
from . import _powers_of_two as _powers
from ._powers_of_two import PowerRounding
from ._registry import (
    CLASS_FUNCTIONS,
    RULES,
    ComplexOperand,
    Transient,
    check_home,
    check_logical,
    check_storage,
    implements,
    promoted_rule_of,
    rule_of,
)

_make = torch.Tensor._make_wrapper_subclass
_data: Any = torch._C.TensorBase.data  # a descriptor, which torch types as its value


@refuses_fully_shard
class ScaledTensor(torch.Tensor):
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
    _home: Any = None  # a dtype, or within a formula a Transient

    __torch_function__: ClassVar[Callable[..., Any]] = torch._C._disabled_torch_function_impl

    if TYPE_CHECKING:  # torch types these as a plain tensor's

        def clone(self, *, memory_format: torch.memory_format | None = None) -> ScaledTensor: ...
        def detach(self) -> ScaledTensor: ...

    def __new__(
        cls,
        payload: Tensor,
        scale: Tensor | float,
        dtype: torch.dtype = torch.float32,
        home: torch.dtype | None = None,
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
        check_storage(payload.dtype)
        require_float64(payload.device, "ScaledTensors")
        check_logical(dtype)
        check_home(home)
        return wrap(resolved(payload.detach(), "a payload"), _powers.as_scale(scale, payload.device), dtype, home)

    @classmethod
    @untraced
    def __torch_dispatch__(  # type: ignore[override]
        cls, operator: Any, types: Any, arguments: tuple[Any, ...] = (), options: dict[str, Any] | None = None
    ) -> Any:
        refuse_make_fx("ScaledTensor")
        try:
            home = home_of(arguments, options)
            if home is not None or in_quotient_formula():
                return promoted_rule_of(operator)(home, arguments, options or {})
            return rule_of(operator)(*arguments, **(options or {}))
        except ComplexOperand:
            return CLASS_FUNCTIONS["in_complex_numbers"](operator, arguments, options or {})
        except (NotImplementedError, RuntimeError):
            CLASS_FUNCTIONS["refuse_sparse"](operator, arguments, options or {})
            raise

    @staticmethod
    def encode(
        x: Tensor,
        dtype: torch.dtype = torch.float16,
        scale: Tensor | float | None = None,
        rounding: PowerRounding = "nearest",
        home: torch.dtype | None = None,
    ) -> ScaledTensor:
        """Encode a plain tensor as payload x scale.

        Scales end at 2^-126: values below that times the payload's smallest number, as float64 has them, become 0.

        Args:
            x: float16, bfloat16, float32 or float64; its dtype becomes the logical one.
            dtype: of the payload: float16, bfloat16, float8_e4m3fn, float8_e5m2 or float32.
            scale: a power of two; None takes one next to the root mean square of the finite non-zero values, or as
                much larger as the largest needs.
            rounding: how the root mean square becomes a power of two: "down", "up" or "nearest" (in log2).
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
        encoded: ScaledTensor = CLASS_FUNCTIONS["encode"](x, dtype, scale, rounding, home)
        return encoded

    @staticmethod
    def implements(*operators: Any) -> Callable[[Given], Given]:
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
        home: torch.dtype | None = None if type(self._home) is Transient else self._home
        return home

    # torch's distributed checkpoints look up every entry of a state_dict as an attribute of the module or tensor.
    payload_scale = scale

    def with_scale(self, scale: Tensor | float) -> ScaledTensor:
        """Return the same values under another scale; finite payloads beyond the storage's range saturate."""
        changed: ScaledTensor = CLASS_FUNCTIONS["with_scale"](self, scale)
        return changed

    def decode(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the value as a plain tensor, rounded once to the logical dtype or another; gradients flow through it.

        >>> import torch
        >>> ScaledTensor(torch.tensor([1.0, 1.5]), 2.0**-3).decode()
        tensor([0.1250, 0.1875])
        """
        value: Tensor = CLASS_FUNCTIONS["decode"](self, dtype)
        return value

    def cast_(self, dtype: torch.dtype) -> ScaledTensor:
        """Change the payload's dtype, in place: the values rounded once, the scale as it is."""
        CLASS_FUNCTIONS["cast_"](self, dtype)
        return self

    def share_memory_(self) -> ScaledTensor:
        """Move payload and scale to memory that processes share."""
        self._payload.share_memory_()
        self._scale.share_memory_()
        return self

    def is_shared(self) -> bool:
        """Return whether processes share the memory."""
        return bool(self._payload.is_shared())

    def tolist(self) -> float | list[Any]:  # type: ignore[override]
        """Return the values as Python floats in nested lists."""
        return self.detach().decode(torch.float64).tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Raise TypeError: NumPy has no type for a payload with a scale."""
        raise TypeError("NumPy has no type for a payload with a scale: x.decode().numpy(), or x.payload and x.scale")

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return self.numpy()

    def __dlpack__(self, **options: Any) -> Any:
        raise TypeError("DLPack has no type for a payload with a scale: hand over x.decode()")

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        text: str = CLASS_FUNCTIONS["format_scaled"](self)
        return text

    def __format__(self, specification: str) -> str:
        return format(self.item(), specification) if self.dim() == 0 and specification else repr(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> ScaledTensor:
        if id(self) in memo:
            copied: ScaledTensor = memo[id(self)]
            return copied
        if not self.is_leaf:
            raise RuntimeError("deepcopy takes leaves only, as for every tensor: copy x.detach(), or use x.clone()")
        with torch._C._DisableFuncTorch():  # inside a transform too a copy is no part of what is transformed
            payload, scale = deepcopy(self._payload, memo), deepcopy(self._scale, memo)
            made = wrap(payload, scale, self.dtype, self._home, self.requires_grad)
        memo[id(self)] = made
        made.__dict__.update(
            {k: deepcopy(v, memo) for k, v in self.__dict__.items() if k not in ("_payload", "_scale")}
        )
        if self.grad is not None:
            made.grad = deepcopy(self.grad, memo)
        return made

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        parts: tuple[Any, ...] = CLASS_FUNCTIONS["pickled_parts"](self)
        return parts

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
        detached: Tensor = _data.__get__(self)
        return detached

    @data.setter
    def data(self, value: Tensor) -> None:
        held: ScaledTensor = value if isinstance(value, ScaledTensor) else CLASS_FUNCTIONS["encoded_like"](value, self)
        _data.__set__(self, held)
        self._payload, self._scale = held._payload, held._scale

    @untraced
    def __tensor_flatten__(self) -> tuple[list[str], tuple[torch.dtype, torch.dtype, torch.dtype | None]]:
        # The payload's dtype too: a compiled backward reads a gradient's memory as the dtype that it was traced with.
        return ["_payload", "_scale"], (self.dtype, self._payload.dtype, self._home)

    @staticmethod
    @untraced
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context: tuple[torch.dtype, torch.dtype, torch.dtype | None], size: Any, stride: Any
    ) -> ScaledTensor:
        return wrap(inner["_payload"], inner["_scale"], context[0], context[2])

    def _stable_hash_for_caching(self) -> str:
        return graph_key(self, RULES.values())

    @untraced
    def __coerce_same_metadata_as_tangent__(self, context: Any, expected: type | None = None) -> Tensor | None:
        if expected is torch.Tensor:
            return self.detach().decode()
        if expected not in (None, ScaledTensor):
            return None
        converted: Tensor = CLASS_FUNCTIONS["with_dtypes"](self.detach(), *context)
        return converted


@untraced
def wrap(
    payload: Tensor, scale: Tensor, dtype: torch.dtype, home: torch.dtype | None = None, requires_grad: bool = False
) -> ScaledTensor:
    """Return payload x scale as a ScaledTensor, unchecked. Rules leave the home to their caller."""
    made = _make(
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


def home_of(arguments: Iterable[Any], options: dict[str, Any] | None) -> torch.dtype | None:
    """Return the home of the first argument that has one, in lists too."""
    for x in arguments:
        kind = type(x)
        if kind is ScaledTensor:
            home: torch.dtype | None = x._home
            if home is not None:
                return home
        elif (kind is list or kind is tuple) and (home := home_of(x, None)) is not None:
            return home
    return home_of(options.values(), None) if options else None


register_collate(ScaledTensor)
