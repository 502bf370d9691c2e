"""Diagnoses of running ranks: hang culprits, stragglers, corrupted replicas, bad links. Pure.

Each diagnosis takes observations as values and names ranks or nodes; the policy decides what to do.
"""
