"""What rounding will do to a training that is planned: at which step each layer freezes, what is lost, what helps."""

from ._costs import Cost as Cost
from ._data import LayerForecast as LayerForecast
from ._forecast import Forecast as Forecast
from ._forecast import forecast as forecast
