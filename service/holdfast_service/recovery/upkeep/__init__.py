"""Upkeep of a running attempt: partners, save intervals, draining nodes, the remote tier.

It keeps the attempt recoverable and never stops training. A failed command is repeated or dropped;
it never becomes a fault.
"""
