"""Faults on request: kinds, the points where they fire, and how each is brought about.

Used by tests, storms and `holdfast inject`; without a request nothing here changes a run.
"""
