"""Waiting, for event loops; `waiting.py` has the same functions for threads."""

from asyncio import sleep
from asyncio import to_thread as off_loop

__all__ = ["off_loop", "sleep"]
