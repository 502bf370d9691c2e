"""The operations of users, as plain async calls: jobs, nodes, checkpoints, code, faults.

The REST routers translate requests into these calls. Each call checks its input and raises errors
that users can act on.
"""
