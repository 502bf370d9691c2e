"""Everything that uses Ray: actors, placement groups, node state and runtime environments.

No other room of the service imports Ray. The actor classes are thin shells over the supervisor
and the node agent.
"""
