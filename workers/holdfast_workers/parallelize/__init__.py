"""Parallelism applied to a plain model: meshes, sharding, tensor parallelism, process groups.

Also keeps a living model through a fault, with new process groups under it.
"""
