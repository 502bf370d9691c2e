"""Which nodes may run ranks, and what the decision ladder knows of them."""
