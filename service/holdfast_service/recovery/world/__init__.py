"""Attempts: how one is formed, proven to have stopped, ended on request and concluded.

A world is formed at most once per attempt number, and only after every host of the former one is
known to have stopped (P1).
"""
