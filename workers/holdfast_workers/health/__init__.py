"""A node's health: probes observe, an evaluator judges; nothing here acts upon it."""
