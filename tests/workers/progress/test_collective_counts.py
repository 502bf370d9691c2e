"""Collectives of torch and of Holdfast's own code are counted, and behave as before."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)

from holdfast_workers.progress import beacon as beacons
from holdfast_workers.progress import collective_counts
from holdfast_workers.progress.beacon import Beacon, BeaconReader
from holdfast_workers.protocol.messages import GroupBeat


@pytest.fixture
def counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A world of one rank with counted collectives; yields the counts by group."""
    for name in collective_counts.KINDS:
        if hasattr(dist, name):
            monkeypatch.setattr(dist, name, getattr(dist, name))  # put back afterwards
    path = beacons.path_of(tmp_path, "w")
    beacons.create(path)
    beacon = Beacon(path)
    beacon.begin(1)
    beacon.enter("forward", 1)
    collective_counts.install(beacon)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    reader = BeaconReader(path)

    def groups() -> dict[str, GroupBeat]:
        reading = reader.read()
        assert reading is not None
        return {group.group: group for group in reading.groups}

    yield groups
    dist.destroy_process_group()


def test_a_collective_of_the_world_is_entered_and_left(counted: Any) -> None:
    x = torch.ones(3)
    dist.all_reduce(x)
    dist.barrier()
    assert x.tolist() == [1.0, 1.0, 1.0]
    assert counted() == {"world": GroupBeat("world", 2, 2, "barrier")}


def test_groups_have_the_names_of_their_axes(counted: Any) -> None:
    tp, dp = (dist.new_group([0], group_desc=f"mesh_{axis}") for axis in ("tp", "dp_shard"))
    before = counted().get("world")
    dist.all_reduce(torch.ones(1), group=tp)
    dist.broadcast(torch.ones(1), 0, tp)
    dist.all_reduce(torch.ones(1), dist.ReduceOp.SUM, dp)
    counts = counted()
    assert counts["tp"] == GroupBeat("tp", 2, 2, "broadcast")
    assert counts["dp_shard"] == GroupBeat("dp_shard", 1, 1, "all_reduce")
    assert counts.get("world") == before


def test_an_axis_as_large_as_the_world_counts_as_the_world(
    counted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch creates a separate group for it if CUDA is available and the default group is gloo."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    mesh = DeviceMesh("cpu", [0], mesh_dim_names=("dp_shard",))
    dist.all_reduce(torch.ones(1), group=mesh.get_group())
    assert mesh.get_group() is not dist.group.WORLD
    assert counted() == {"world": GroupBeat("world", 1, 1, "all_reduce")}


def test_an_asynchronous_collective_is_left_when_a_later_one_is(counted: Any) -> None:
    work = dist.all_reduce(torch.ones(1), async_op=True)
    assert isinstance(work, dist.Work)
    assert counted()["world"] == GroupBeat("world", 1, 0, "all_reduce")
    work.wait()
    dist.barrier()
    assert counted()["world"] == GroupBeat("world", 2, 2, "barrier")


def test_a_failed_collective_stays_entered(counted: Any) -> None:
    with pytest.raises(ValueError, match="scatter_list"):
        dist.scatter(torch.ones(1), scatter_list=None, src=0)
    assert counted()["world"] == GroupBeat("world", 1, 0, "scatter")


def test_collectives_of_sharded_modules_are_counted_under_any_name(counted: Any) -> None:
    group, ones = dist.new_group([0], group_desc="mesh_dp_shard"), torch.ones(4)
    gathered, scattered = torch.empty(4), torch.empty(4)
    DefaultAllGather()(gathered, ones, group)
    assert counted()["dp_shard"] == GroupBeat("dp_shard", 1, 1, "all_gather")
    DefaultReduceScatter()(scattered, ones, group, dist.ReduceOp.SUM)
    assert counted()["dp_shard"] == GroupBeat("dp_shard", 2, 2, "reduce_scatter")
    assert gathered.tolist() == scattered.tolist() == ones.tolist()


def test_a_rank_outside_a_group_may_still_call_its_collectives(counted: Any) -> None:
    outside = dist.GroupMember.NON_GROUP_MEMBER
    with pytest.warns(UserWarning, match="does not belong to the given group"):
        assert dist.all_reduce(torch.ones(1), group=outside) is None
    assert counted() == {}


def test_no_group_is_kept_alive(counted: Any) -> None:
    """A stray reference would keep its sockets open and delay its peers' notice of a death."""
    group = dist.new_group([0], group_desc="mesh_tp")
    dist.barrier(group)
    gone = weakref.ref(group)
    dist.destroy_process_group(group)
    del group
    assert gone() is None


def test_every_collective_is_wrapped_with_its_kind() -> None:
    for name, kind in collective_counts.KINDS.items():
        assert name.startswith(kind)
    assert {"all_gather_into_tensor", "reduce_scatter_tensor"} <= collective_counts.KINDS.keys()
    assert all(hasattr(dist, name) for name in ("all_gather", "all_reduce", "broadcast"))
