"""Data of the recovery core: its state, its inputs and its effects.

Only values and the few operations that every other package of the core needs; no decisions.
"""
