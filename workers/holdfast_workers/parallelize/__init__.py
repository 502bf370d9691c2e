"""Parallelism applied from outside to a plain model, through DeviceMesh and DTensor."""
