"""What the recovery core knows, is given and asks for: state, inputs, effects.

Values and the few operations that every other room of the core needs; no decisions.
"""
