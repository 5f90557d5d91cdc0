"""Running trials: the plan, the worker processes and the folder of results."""
