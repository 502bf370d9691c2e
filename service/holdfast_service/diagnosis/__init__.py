"""Pure judgements about running ranks: hang culprits, stragglers, corrupted replicas, bad links.

Each takes observations as values and names ranks or nodes; what follows is the policy's decision.
"""
