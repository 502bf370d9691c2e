"""Drives jobs from the state that users desire to the state that the cluster has.

Each job is driven under a lease with a token; every effect is preceded by a stored intent, so a
crashed reconciler's work is adopted, never repeated.
"""
