"""The nodes that may run ranks, and the input of the decision ladder."""
