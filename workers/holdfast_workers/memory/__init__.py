"""Memory checkpoints: shared-memory segments, their replication, and lifelines between agents.

Nothing here imports torch: the node agent, which owns this tier, stays light.
"""
