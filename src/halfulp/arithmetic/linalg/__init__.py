"""Linear algebra of expansions: factorizations in float64, refined with exact residuals."""
