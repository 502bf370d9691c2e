"""The life of an attempt: formation, proof of stop, graceful stop, and the outcome of the job.

A world is formed at most once per attempt number, and only after every host of the former world is
known to have stopped (P1).
"""
