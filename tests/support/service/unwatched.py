"""The connection of a process that has connected to Ray by itself, or that has no Ray at all."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from holdfast_service.cluster.connection import ConnectionTimes, RayConnection


class Unwatched(RayConnection):
    """It is always there."""

    def __init__(self) -> None:
        super().__init__(str, "", ConnectionTimes(), lambda _: None)
        self._is_open = True

    @contextlib.contextmanager
    def in_use(self, *, control: bool) -> Iterator[None]:
        yield
