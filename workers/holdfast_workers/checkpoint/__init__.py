"""Remote checkpoints: sharded files, manifests written last, verified loading, retention.

A checkpoint exists once its manifest does; what does not match its digests is never loaded.
"""
