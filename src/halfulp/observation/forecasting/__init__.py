"""What rounding will do to a training that is planned: at which step each layer freezes, what is lost, what helps."""

from ._layers import Forecast as Forecast
from ._layers import LayerForecast as LayerForecast
from ._run import forecast as forecast
