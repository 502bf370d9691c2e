"""Process groups of all ranks on the CPU, one for each purpose, made when they are first needed."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist


class GlooGroups:
    """The gloo groups of a program. `timeout_s` bounds their collectives. A program that
    initializes torch.distributed again gets new groups."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout = timedelta(seconds=timeout_s)
        self._groups: dict[str, tuple[Any, dist.ProcessGroup]] = {}

    def get(self, purpose: str) -> dist.ProcessGroup:
        """The group; all ranks make its first call, in the same order as for other purposes."""
        world = dist.group.WORLD
        made_in, group = self._groups.get(purpose, (None, None))
        if group is None or made_in is not world:
            group = dist.new_group(
                backend="gloo", timeout=self._timeout, group_desc=f"tier-{purpose}"
            )
            self._groups[purpose] = (world, group)
        return group
