"""What the numbers of a run, a checkpoint or a plan show: observe, audit, forecast, and findings with their cures."""

from .. import _needs_torch as _needs_torch
from ._finding import Finding as Finding
from ._loss_allocation import LossAllocation as LossAllocation
from ._loss_allocation import allocate_loss as allocate_loss
from ._record import Record as Record
from .auditing._audit import Audit as Audit
from .auditing._run import audit as audit
from .findings import FindingKind as FindingKind
from .findings import register_finding as register_finding
from .forecasting import Forecast as Forecast
from .forecasting import LayerForecast as LayerForecast
from .forecasting import forecast as forecast
from .observing._observation import Observation as Observation
from .observing._observation import observe as observe
from .observing._updates import register_elementwise as register_elementwise
