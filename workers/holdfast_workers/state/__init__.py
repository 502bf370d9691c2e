"""A rank's training state as one flat payload: layout, digest, staging, replicas.

At equal step, seed and mesh the payloads are equal byte for byte (P2).
"""
