"""Evidence from finished trials: rows per recipe, their statistics, and tables and pages of them."""
