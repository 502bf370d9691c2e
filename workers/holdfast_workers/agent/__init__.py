"""The node agent: one per node of a job. It runs the node's workers and owns its memory tier.

Nothing here imports torch. A worker never outlives its agent.
"""
