"""What crosses the wire between supervisor, agents and workers: messages and leases."""
