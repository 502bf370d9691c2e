"""A world without anybody else in it, to build a model in before there are peers to build it with.

torch's fake process group copies what it has and sends nothing. The model is afterwards as one
whose peers have gone: real groups are put under it as under a survivor's. torch caches where on the
mesh a process stands, so one that has built for a place is good for no other.
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
def imaginary_peers(world: World) -> Iterator[None]:
    """The default group of `world`: while it stands, collectives mean nothing."""
    dist.init_process_group(
        dist.Backend.FAKE, store=HashStore(), rank=world.rank, world_size=world.world_size
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a fake group has no time-out to be set
            yield
    finally:
        dist.destroy_process_group()
