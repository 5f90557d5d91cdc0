"""The pages of observe, audit and forecast: plain data made into one self-contained HTML file each."""

from ._observation import render_observation_page as render_observation_page
from ._write import render_audit_page as render_audit_page
from ._write import render_forecast_page as render_forecast_page
from ._write import write_page as write_page
