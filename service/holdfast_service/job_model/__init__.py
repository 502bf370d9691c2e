"""The model of a job: its spec, its states, its events, its errors. Values and rules, no I/O.

The transition table in `lifecycle.py` is the only place that defines which state may follow which.
"""
