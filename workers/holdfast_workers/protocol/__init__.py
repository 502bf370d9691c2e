"""The protocol between supervisor, agents and workers: message types and step leases."""
