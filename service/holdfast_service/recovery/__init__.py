"""The pure recovery core: inputs with a time go in, effects come out.

The core has no clock, no I/O and no Ray. `core.py` dispatches each input to the packages of this
directory, reports the faults that they return, and then forms an attempt if one is due. Each
package imports only those before it (an import contract): `core_state`, `nodes`, `upkeep`, `world`,
`faults`, `signals`.
"""
