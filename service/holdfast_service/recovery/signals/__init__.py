"""Handlers of signals and agent reports. They apply to the present world; stale ones are ignored.

`takeover.py` starts the first attempt, or adopts the attempt of a former supervisor.
"""
