"""The data plane: node agents, workers, process groups, checkpoints, recipes, guards.

It knows nothing of jobs, users, databases or HTTP, and its training core runs without Ray. Its
rooms, bottom up, are an import contract in `pyproject.toml`.
"""
