"""The Ray cluster that `holdfast serve` starts on its own machine, and the process that keeps it.

The keeper owns the Ray processes; when it dies, the kernel ends them with it.
"""
