"""Node health: probes of GPUs and host, evaluation into findings, the pre-flight check.

A value that was not measured is never taken for healthy.
"""
