"""From a detected fault to its decision: failed ranks, hangs, stragglers, corruption, bad nodes.

A module that detects returns the faults that it finds, and the core passes them to `judgement.py`.
Only `hang_suspicion.py` reports its fault itself, because it completes the incident.
"""
