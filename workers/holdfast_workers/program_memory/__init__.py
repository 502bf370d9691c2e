"""Memory checkpoints of a user's own program: a rank's part of a step, in the rank's own segment.

An attached program saves through `torch.distributed.checkpoint` (DCP), as an object, or as a
folder (`memory_tier.py`). For the rest of the house the bytes are one opaque entry: replicated,
verified and delivered like those of a recipe.
"""
