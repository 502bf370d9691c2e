"""The control plane: stores jobs, drives them on a Ray cluster and decides how each recovers.

It never imports torch or FastAPI. Its rooms, bottom up, are an import contract in `pyproject.toml`.
"""
