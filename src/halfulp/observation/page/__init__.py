"""The pages of observe, audit and forecast: plain data made into one self-contained HTML file each."""

from ._observation import observation_html as observation_html
