"""Remote checkpoints: sharded files, manifests written last, verified loading, retention.

A checkpoint exists once its manifest exists. Bytes that do not match their digest are never loaded.
"""
