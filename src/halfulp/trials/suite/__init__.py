"""The papers' suite: their kinds of tasks under every recipe, their figures and findings beside ours."""
