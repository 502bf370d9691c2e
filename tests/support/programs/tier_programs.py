"""Programs of users that keep memory checkpoints, as the tests of the memory tier run them."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from holdfast.integrations.ray_train.memory_checkpoints import TierCheckpoints
from holdfast.integrations.ray_train.rank_group import RankGroup
from holdfast.torch import tier
from holdfast_workers.errors import WorkersError
from holdfast_workers.program_memory import dcp_storage, folder_parts, own_segment
from holdfast_workers.program_memory.folder_parts import FilePiece, FolderWriter
from holdfast_workers.program_memory.payload import PayloadIndex, PayloadKind, PayloadWriter
from holdfast_workers.program_memory.rank_payloads import RankPayloads
from holdfast_workers.programs.attachment import attach
from holdfast_workers.protocol.programs import SOCKET_VARIABLE
from holdfast_workers.state.digest import payload_digest

WIDTH = 32
WAIT_S = 0.5
SMALL = 1 << 17
"""Bytes of a file for which there is room."""


class Training(Stateful):
    """A model with dropout, its optimizer, the step and the random generator of this rank."""

    def __init__(self, kind: str) -> None:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(WIDTH, WIDTH), torch.nn.Dropout(0.1), torch.nn.Linear(WIDTH, 7)]
        model: torch.nn.Module = torch.nn.Sequential(*layers)
        if kind == "fsdp2":
            fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        else:
            model = DistributedDataParallel(model)
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        self.step = 0
        torch.manual_seed(7 + dist.get_rank())

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        name = f"rng{dist.get_rank()}"
        return {
            "model": model,
            "optimizer": optimizer,
            "step": self.step,
            name: torch.get_rng_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.step = state["step"]
        torch.set_rng_state(state[f"rng{dist.get_rank()}"])

    def train(self, until: int) -> dict[int, float]:
        """The loss of each step."""
        losses = {}
        while self.step < until:
            seed = 1000 * dist.get_rank() + self.step
            batch = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))
            loss = self.model(batch).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step += 1
            losses[self.step] = loss.item()
        return losses


def train_and_save(rank: int, kind: str, save_at: int, until: int) -> dict[int, float]:
    training, kept = Training(kind), tier()
    training.train(save_at)
    dcp.save({"training": training}, storage_writer=kept.at(save_at))
    return training.train(until)


def save_beside_training(rank: int, kind: str, save_at: int, until: int) -> dict[int, float]:
    """Steps, with their collectives, go on while checkpoints are written."""
    training, kept = Training(kind), tier()
    training.train(save_at)
    saving = dcp.async_save(
        {"training": training}, storage_writer=kept.at(save_at), process_group=kept.group
    )
    losses = training.train(until)
    assert not isinstance(saving, dcp.state_dict_saver.AsyncSaveResponse)
    saving.result(timeout=WAIT_S * 60)
    return losses


def save_beside_training_outside(rank: int, until: int) -> bool:
    """The same program, without Holdfast."""
    del os.environ[SOCKET_VARIABLE]
    save_beside_training(rank, "fsdp2", 3, until)
    return tier().active


def restore_and_train(rank: int, kind: str, until: int) -> dict[int, float]:
    training, kept = Training(kind), tier()
    step = kept.newest()
    assert step is not None
    training.train(1)  # differs from what is loaded
    dcp.load({"training": training}, storage_reader=kept.at(step))
    assert training.step == step
    return training.train(until)


def grid(rank: int, world_size: int, factor: float) -> dict[str, Any]:
    """Tensors that are sharded by 12 rows or columns, replicated, and of several forms."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world_size,))
    whole = torch.arange(12 * 5, dtype=torch.float32).view(12, 5) * factor
    state: dict[str, Any] = {
        "rows": distribute_tensor(whole, mesh, [Shard(0)]),
        "columns": distribute_tensor(whole.t().contiguous(), mesh, [Shard(1)]),
        "same": distribute_tensor(whole + 1, mesh, [Replicate()]),
        "turned": whole[:3].t(),  # not contiguous
        "half": (whole[0] + 2).bfloat16(),
        "flags": whole[1] > 30 * factor,
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(3.5 * factor, dtype=torch.float64),
        "name": f"run {float(factor)}",
    }
    return state


def save_grid(rank: int, steps: list[int], kill: str, killed_rank: int) -> list[int]:
    """Save `steps`; the last one is broken off on one rank, at the point `kill`."""
    kept = tier(replication_wait_s=WAIT_S)
    world_size = dist.get_world_size()
    for step in steps:
        if step == steps[-1] and rank == killed_rank:
            _die_at(kill)
        dcp.save(grid(rank, world_size, step), storage_writer=kept.at(step))
    return steps


def save_what_one_cannot(rank: int) -> str:
    """The error of a save for which rank 1 has an object that cannot be written."""
    try:
        tier().save(1, Lock() if rank == 1 else {})
    except (TypeError, WorkersError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def load_different_steps(rank: int) -> str:
    """The error of a load for which each rank names another step."""
    kept = tier()
    for step in (10, 20):
        dcp.save({f"w{rank}": torch.zeros(8)}, storage_writer=kept.at(step))
    try:
        dcp.load({f"w{rank}": torch.zeros(8)}, storage_reader=kept.at(10 * (rank + 1)))
    except CheckpointException as error:
        return str(error)
    return ""


def save_with_little_room(rank: int, steps: list[int]) -> list[int]:
    """Save in slots without head-room, and load."""
    dcp_storage.METADATA_BYTES = dcp_storage.METADATA_BYTES_PER_ITEM = 0
    own_segment.HEAD_ROOM_BYTES, own_segment.HEAD_ROOM_SHARE = 0, 1 << 40
    kept, loaded = tier(), []
    for step in steps:
        dcp.save({"weights": torch.ones(1 << 16)}, storage_writer=kept.at(step))
        dcp.load({"weights": torch.zeros(1 << 16)}, storage_reader=kept.at(step))
        loaded.append(step)
    return loaded


def save_alone(rank: int) -> None:
    """Each rank saves a state that only it knows."""
    dcp.save(_own_state(rank, 1.0), storage_writer=tier().at(10), no_dist=True)


def load_alone(rank: int) -> None:
    state = _own_state(rank, 0.0)
    kept = tier()
    assert kept.newest() == 10
    dcp.load(state, storage_reader=kept.at(10), no_dist=True)
    assert torch.equal(state[f"of-{rank}"], torch.ones(rank + 1))


def _own_state(rank: int, value: float) -> dict[str, Any]:
    return {f"of-{rank}": torch.full((rank + 1,), value)}


def save_too_early(rank: int) -> list[int]:
    """A save begins before the last one is complete; the last one fails, and this one is kept."""
    payloads = tier()._payloads
    assert payloads is not None
    index = PayloadIndex(PayloadKind.OBJECT, 1, rank, 1)
    early, late = payloads.agree(1), payloads.agree(2)
    first = payloads.begin(early, [], index)
    second = payloads.begin(late, [], replace(index, step=2))
    with (
        pytest.raises(WorkersError, match="wait for the result of async_save"),
        payloads.finishing(first),
    ):
        payloads.commit(first, early, index)
    with payloads.finishing(second):
        payloads.commit(second, late, replace(index, step=2))
    return payloads.locate(2).at_hand.owners


def save_on_some_ranks(rank: int) -> None:
    group = dist.new_group([0, 1])
    if rank < 2:
        with pytest.raises(CheckpointException, match="a process group of all ranks"):
            state = {"weights": torch.ones(2)}
            dcp.save(state, storage_writer=tier().at(1), process_group=group)


def _die_at(point: str) -> None:
    def die(*_: Any, **__: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    calls = {"copied": 0}
    copy = PayloadWriter.copy

    def die_in_the_middle(self: PayloadWriter, source: Any) -> Any:
        calls["copied"] += 1
        return die() if calls["copied"] == 2 else copy(self, source)

    if point == "write":
        PayloadWriter.copy = die_in_the_middle  # type: ignore[method-assign]
    if point == "commit":
        RankPayloads.commit = die  # type: ignore[method-assign]


def load_grid(rank: int, expected: int) -> None:
    kept = tier()
    step = kept.newest()
    assert step == expected
    world_size = dist.get_world_size()
    state = grid(rank, world_size, 0.0)
    dcp.load(state, storage_reader=kept.at(expected))
    wanted = grid(rank, world_size, float(expected))
    for name, value in wanted.items():
        found = state[name]
        if isinstance(value, Tensor):
            assert torch.equal(_local(found), _local(value)), name
    assert state["name"] == f"run {float(expected)}"


def _local(tensor: Any) -> Tensor:
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


def save_objects(rank: int, steps: list[int]) -> list[bool]:
    kept = tier(replication_wait_s=WAIT_S)
    return [
        kept.save(step, {"step": step, "weights": torch.full((rank + 1, 3), float(step))})
        for step in steps
    ]


def timed_save(rank: int) -> float:
    """Seconds of the second save; the first makes the segment."""
    kept = tier(replication_wait_s=3600.0)
    kept.save(1, torch.zeros(3))
    began = time.monotonic()
    kept.save(2, torch.zeros(3))
    return time.monotonic() - began


def load_objects(rank: int, of_rank: int | None) -> Any:
    kept = tier()
    state = kept.load(of_rank=of_rank)
    return None if state is None else (state["step"], state["weights"].tolist())


def save_sizes(rank: int, sizes: list[int]) -> list[bool]:
    kept = tier(replication_wait_s=WAIT_S)
    return [kept.save(step, torch.zeros(size)) for step, size in enumerate(sizes, 1)]


def save_files(rank: int, folder: str, gives: bool) -> bool:
    kept = tier()
    return kept.save_folder(5, Path(folder) / f"from-{rank}" if gives else None)


def load_files(rank: int, folder: str) -> dict[str, str]:
    """The digests of the files."""
    target = Path(folder) / f"to-{rank}"
    _load_in_pieces(target)
    return _digests(target)


def load_shared_files(rank: int, folder: str) -> tuple[int, dict[str, str]]:
    """Number of pieces that this rank wrote, and the digests of the files in a folder that the
    ranks share."""
    written = []
    write = FolderWriter.write

    def count(self: FolderWriter, piece: FilePiece, content: memoryview) -> None:
        written.append(piece)
        write(self, piece, content)

    FolderWriter.write = count  # type: ignore[method-assign]
    _load_in_pieces(Path(folder) / "shared")
    return len(written), _digests(Path(folder) / "shared")


def load_files_without_room(rank: int, folder: str) -> tuple[str, list[str]]:
    """The error of a load for which rank 0 has no room, and the files that are left."""
    target = Path(folder) / f"to-{rank}"
    with file_limit(SMALL if rank == 0 else resource.RLIM_INFINITY):
        try:
            _load_in_pieces(target)
        except WorkersError as error:
            return type(error).__name__, [path.name for path in target.rglob("*")]
    return "", []


def take_report_without_room(rank: int) -> bool:
    """Whether Ray Train's report came from memory; rank 0 has no room for its files."""
    checkpoints = TierCheckpoints(attach(), RankGroup(WAIT_S * 20), is_first_of_node=True)
    with file_limit(SMALL if rank == 0 else resource.RLIM_INFINITY):
        return checkpoints.take(stored=0) is not None


@contextmanager
def file_limit(nbytes: int) -> Iterator[None]:
    """Files may have only `nbytes`: a write beyond it fails, as on a full file system."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def _load_in_pieces(target: Path) -> None:
    folder_parts.PIECE_BYTES = 1 << 16
    folder_parts.BATCH_BYTES = 1 << 17
    assert tier().load_folder(target) == 5


def _digests(target: Path) -> dict[str, str]:
    return {
        path.relative_to(target).as_posix(): payload_digest(path.read_bytes())
        for path in target.rglob("*")
        if path.is_file()
    }
