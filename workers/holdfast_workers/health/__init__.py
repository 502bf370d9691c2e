"""Node health: probes of GPUs and host, evaluation into findings, the pre-flight check.

"Not measured" is never taken for healthy.
"""
