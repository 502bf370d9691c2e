"""The signals that end a command, and a block that ignores them."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

END_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def ignored() -> Iterator[None]:
    """Ignore the signals inside, and handle them as before afterwards. Call it in the main
    thread."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in END_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
