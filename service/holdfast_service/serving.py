"""Who is being served right now: work that nobody asked for lets them finish first."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator


class Serving:
    """Counts the requests of users that have no answer yet. One per process, in its loop."""

    def __init__(self) -> None:
        self._count = 0
        self._quiet: asyncio.Event | None = None  # where somebody waits for it

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        self._count += 1
        try:
            yield
        finally:
            self._count -= 1
            if not self._count and self._quiet is not None:
                self._quiet.set()
                self._quiet = None

    async def quiet(self, most_s: float) -> None:
        """Returns once nobody is being served, and after `most_s` at the latest."""
        if not self._count:
            return
        if self._quiet is None:
            self._quiet = asyncio.Event()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._quiet.wait(), most_s)
