"""The copy that `async_save` makes before training goes on, into memory that is used again.

New memory costs several times what the copy itself does, so the buffers of the last save stay.
"""

from __future__ import annotations

from threading import Lock
from typing import Any

from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions


class KeptStaging:
    """Stages state dicts of one program. While a save still reads its copy, the next one gets
    memory of its own."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._stager: DefaultStager | None = None

    def stage(self, state: dict[str, Any]) -> tuple[dict[str, Any], DefaultStager]:
        """A copy of `state` on the host, and the owner of its memory, to `give_back`."""
        with self._lock:
            stager, self._stager = self._stager, None
        if stager is None:
            stager = DefaultStager(
                StagingOptions(
                    use_pinned_memory=False,
                    use_shared_memory=False,
                    use_async_staging=False,
                    use_non_blocking_copy=False,
                )
            )
        staged = stager.stage(state)
        assert isinstance(staged, dict)  # as it does not stage in a thread
        return staged, stager

    def give_back(self, stager: DefaultStager) -> None:
        """The copy in the memory of `stager` is no longer read."""
        with self._lock:
            self._stager = stager
