"""eps-zero: the eps of an optimizer is zero in the dtype that it is added in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from .... import formats
from ..._dtypes import dtype_name
from ..._finding import Finding
from ..._words import number
from ...record._record import ParameterRecord, Record
from .._kind import FindingKind, register_finding
from .._range_use import has_wide_range

if TYPE_CHECKING:
    from ...forecasting._data import ForecastData

# Where the optimizer's states are kept in float32, its denominators are.
STATES = ("exp_avg_sq", "square_avg", "sum", "exp_inf")


@register_finding
class EpsZero(FindingKind):
    """The optimizer's eps rounds to zero in its dtype: where a second moment is zero too, the update is 0/0."""

    code = "eps-zero"
    cure = (
        "eps=1e-7 or more in float16 (1e-4 where the moments underflow too), or float32 states; hu.optim "
        "computes in float32"
    )
    says = "{place} [divides|divide] by zero where the second moment is zero: eps {eps} is 0 in {dtype}"
    role = "second moment"
    wide_cure = "an eps that the dtype holds, such as 1e-8"

    def in_record(self, record: Record) -> Iterator[Finding]:
        for name, parameter in record.parameters.items():
            eps, dtype = number(parameter.options, "eps"), _denominator(parameter)
            if parameter.optimizer is None or eps is None or not eps > 0 or dtype is None:
                continue
            if float(torch.tensor(eps, dtype=dtype, device="cpu")) == 0:
                yield self._found(name, eps, dtype)

    def in_forecast(self, forecast: ForecastData) -> Iterator[Finding]:
        zero: dict[tuple[float, torch.dtype], list[str]] = {}
        for layer in forecast.layers:
            eps, dtype = layer.eps, layer.denominator
            if eps and dtype is not None and float(torch.tensor(eps, dtype=dtype, device="cpu")) == 0:
                zero.setdefault((eps, dtype), []).append(layer.name)
        for (eps, dtype), names in zero.items():
            yield self._found(names, eps, dtype)

    def _found(self, names: str | list[str], eps: float, dtype: torch.dtype) -> Finding:
        said = f"eps {eps:.3g} is 0 in {dtype_name(dtype)}"
        cure = self.wide_cure if has_wide_range(formats.get(dtype)) else self.cure
        return self.found(names, "error", 1.0, said, cure=cure, eps=eps, dtype=dtype_name(dtype))


def _denominator(parameter: ParameterRecord) -> torch.dtype | None:
    """Return the dtype in which the optimizer adds eps; None where it does so in float32 whatever it stores."""
    if not parameter.optimizer_module.startswith("torch.optim."):
        return None
    found = [parameter.state_dtypes[state] for state in STATES if state in parameter.state_dtypes]
    dtype = found[0] if found else parameter.dtype
    return dtype if dtype.is_floating_point else None
