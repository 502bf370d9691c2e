"""The node agent: one for each node of a job. It runs the node's workers and owns the node's memory
checkpoints.

Nothing here imports torch. A worker never outlives its agent.
"""
