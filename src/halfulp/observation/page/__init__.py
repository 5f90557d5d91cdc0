"""The pages of observe, audit and forecast: plain data made into one self-contained HTML file each."""

from ._pages import InstrumentName as InstrumentName
from ._pages import render_audit_page as render_audit_page
from ._pages import render_forecast_page as render_forecast_page
from ._pages import render_observation_page as render_observation_page
from ._pages import write_page as write_page
