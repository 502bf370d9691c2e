"""The pure recovery core: inputs with a time go in, effects come out.

It has no clock, no I/O and no Ray. `core.py` dispatches each input to the rooms below, whose order
is an import contract: `core_state`, `nodes`, `upkeep`, `world`, `faults`, `signals`.
"""
