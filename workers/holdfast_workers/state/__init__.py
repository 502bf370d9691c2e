"""A rank's training state as one flat payload: layout, digest, staging, replicas.

At equal step, seed and mesh the payload's bytes are equal (P2).
"""
