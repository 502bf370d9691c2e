"""Starts and ends Ray on this machine, as one node of a cluster of several machines.

It runs `ray start`, records what it started, and ends exactly that: never another user's Ray.
"""
