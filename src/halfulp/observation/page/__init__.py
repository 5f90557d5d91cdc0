"""The pages of observe, audit and forecast: plain data made into one self-contained HTML file each."""

from ._observation import observation_html as observation_html
from ._write import audit_html as audit_html
from ._write import forecast_html as forecast_html
from ._write import write_page as write_page
