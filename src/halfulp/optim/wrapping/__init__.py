"""Any torch optimizer on narrow parameters."""
