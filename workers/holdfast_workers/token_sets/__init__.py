"""Token sets: made once of a source's documents, and brought to the nodes that train on them.

Whatever writes here is idempotent and may die at any moment: a part of a set is named by what it
was made of, and the manifest is written last. What arrives on a node is verified.
"""
