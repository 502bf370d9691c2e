"""Optimizers and learning-rate schedules that work on local shards."""
