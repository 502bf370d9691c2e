"""Agreement of all ranks on the step after which they stop.

Holdfast asks each rank to stop, at slightly different moments. If each acted by itself, a rank
could stop one step before the others, which would then wait for it. So the ranks exchange their
wishes after every step: the request is combined while the next step computes, and takes effect one
step later, on all ranks alike.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


class AgreedStop:
    """Created and called by all ranks alike, `ask` after every step, `close` after the last."""

    def __init__(self) -> None:
        self._group: Any = None
        self._flag = torch.zeros(1, dtype=torch.int32)
        self._exchange: Any = None
        self._agreed = False
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            self._group = dist.new_group(backend="gloo")

    def ask(self, wanted: bool) -> bool:
        """Whether to stop now: some rank wanted to stop when all ranks asked one step ago."""
        if self._group is None:
            self._agreed |= wanted
            return self._agreed
        self._await()
        self._flag.fill_(int(wanted))
        self._exchange = dist.all_reduce(
            self._flag, op=dist.ReduceOp.MAX, group=self._group, async_op=True
        )
        return self._agreed

    def gather(self, own: Any) -> list[Any]:
        """The object of each rank, by rank."""
        if self._group is None:
            return [own]
        self._await()
        found: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(found, own, group=self._group)
        return found

    def close(self) -> None:
        """Wait for the last exchange."""
        self._await()

    def _await(self) -> None:
        if self._exchange is not None:
            self._exchange.wait()
            self._exchange = None
            self._agreed |= bool(self._flag.item())
