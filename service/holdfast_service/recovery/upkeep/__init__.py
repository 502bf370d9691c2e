"""What keeps a running attempt recoverable: partners, save intervals, drains, the remote tier.

Nothing here stops training; a failed command is repeated or given up, never escalated.
"""
