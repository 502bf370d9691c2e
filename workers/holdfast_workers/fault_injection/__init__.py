"""Fault injection: the kinds of faults, the points where they fire, and their implementation.

Tests, storms and `holdfast inject` use it; without a request it never changes a run.
"""
