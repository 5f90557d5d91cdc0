"""The cheapest recipe that stays with float32 on a task: candidates from observed trainings, tried at matched seeds."""
