"""The commands `submit` and `run`: they submit a job, and follow it until it ends if wanted."""
