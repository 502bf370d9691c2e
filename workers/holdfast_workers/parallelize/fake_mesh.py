"""A process group without peers, for building a sharded model before its peers exist.

torch's fake process group copies its own data and sends nothing. Afterwards the model is like that
of a survivor whose peers have died: real groups replace the fake ones in the same way. torch
caches a process's coordinates on the mesh, so a process that has built for one rank cannot serve
as another rank.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # noqa: F401 (registers the backend)
from torch._C._distributed_c10d import HashStore

from holdfast_workers.training.recipe import World


@contextmanager
def fake_process_group(world: World) -> Iterator[None]:
    """Provide a fake default group for `world`; meanwhile collectives compute nothing."""
    dist.init_process_group(
        dist.Backend.FAKE, store=HashStore(), rank=world.rank, world_size=world.world_size
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a fake group has no time-out to set
            yield
    finally:
        dist.destroy_process_group()
