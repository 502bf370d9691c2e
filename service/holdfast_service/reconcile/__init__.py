"""Drives jobs on the cluster to the state that their users desire.

Each job is driven under a lease with a token. Every effect is preceded by a stored intent, so the
successor of a crashed reconciler adopts its work and never repeats it.
"""
