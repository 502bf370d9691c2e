"""Data of the recovery core: its state, its inputs and its effects.

Each part of the state has an owner, whose file alone changes it, by named operations. No decisions.
"""
