"""What users can do, as plain async calls: jobs, nodes, checkpoints, code, faults.

The REST routers translate to these; each checks its input and raises errors that users can act on.
"""
