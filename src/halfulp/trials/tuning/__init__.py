"""Search for the cheapest recipe that stays with float32 on a task, among candidates from observed trainings."""
