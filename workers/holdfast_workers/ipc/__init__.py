"""Processes on one node: child processes, control channels, the I/O loop, Linux process facts."""
