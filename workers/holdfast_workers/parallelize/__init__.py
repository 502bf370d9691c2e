"""Parallelism applied to a plain model: meshes, sharding, tensor parallelism, process groups.

Also keeps a model in memory through a fault and replaces its process groups.
"""
