"""Processes that act as nodes in `benchmarks.reshard`, each with a node agent's data server.

A node holds the state of some ranks of one mesh. Later its ranks of another mesh fetch their state
from all nodes at once, up to the copy into their tensors.
"""

from __future__ import annotations

import math
import multiprocessing
import shutil
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.mesh_layouts import (
    RANDOM,
    RANDOM_BYTES,
    Parameter,
    fill,
    layout_of,
    random_state,
)
from holdfast_workers.memory.data_server import DataServer
from holdfast_workers.memory.reshard import Reshard
from holdfast_workers.memory.segment_store import SegmentStore, mesh_tag
from holdfast_workers.protocol.messages import Origin, Place, Restore, Tier
from holdfast_workers.state.digest import payload_digest

SECRET = b"a benchmark's secret"
RANKS_PER_NODE = 2
STEP, ATTEMPT = 5, 1
TIMEOUT_S = 120.0
OWN = {RANDOM: bytes(RANDOM_BYTES)}

Mesh = dict[str, int]


class NodeProcesses:
    """Node processes that hold the state of `parameters`, and their memory; call `close` at the
    end."""

    def __init__(self, count: int, parameters: tuple[Parameter, ...], seed: int) -> None:
        self._root = Path(tempfile.mkdtemp(prefix="bench-", dir="/dev/shm"))
        context = multiprocessing.get_context("spawn")
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        for index in range(count):
            ours, theirs = context.Pipe()
            arguments = (f"n{index}", str(self._root / f"n{index}"), parameters, seed, theirs)
            self._processes.append(context.Process(target=_node, args=arguments))
            self._processes[-1].start()
            self._pipes.append(ours)

    def hold(self, mesh: Mesh) -> Restore:
        """Store in the nodes the state that an attempt on `mesh` leaves there: every rank's state,
        and a replica on the next node."""
        ranks = math.prod(mesh.values())
        held: list[list[tuple[int, Place]]] = [[] for _ in self._pipes]
        node_count = -(-ranks // RANKS_PER_NODE)
        for rank in range(ranks):
            held[rank // RANKS_PER_NODE].append((rank, Place.OWN))
            if node_count > 1:
                held[(rank // RANKS_PER_NODE + 1) % node_count].append((rank, Place.REPLICA))
        answers = self._ask("hold", [(mesh, copies) for copies in held])
        origins = tuple(origin for answer in answers for origin in answer)
        return Restore(Tier.RESHARD, STEP, attempt=ATTEMPT, mesh=mesh_tag(mesh), origins=origins)

    def reshard(self, source: Restore, mesh: Mesh) -> float:
        """Restore every rank of `mesh`; returns the seconds until the last rank has its tensors.

        Raises RuntimeError if the state of a rank is wrong.
        """
        ranks = range(math.prod(mesh.values()))
        by_node = [[rank for rank in ranks if rank // RANKS_PER_NODE == n] for n in self._numbers()]
        self._ask("prepare", [(mesh, on_node) for on_node in by_node])
        began = time.perf_counter()
        self._ask("reshard", [(source, mesh, on_node) for on_node in by_node])
        took = time.perf_counter() - began
        wrong = [rank for found in self._ask("wrong", [(mesh,)] * len(by_node)) for rank in found]
        if wrong:
            raise RuntimeError(f"ranks {wrong} of {mesh} do not have the state of {source.mesh}")
        return took

    def free(self) -> None:
        self._ask("free", [()] * len(self._pipes))

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        shutil.rmtree(self._root, ignore_errors=True)

    def _numbers(self) -> range:
        return range(len(self._pipes))

    def _ask(self, method: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
        """Call `method` in every node process at once, with its element of `arguments`."""
        for pipe, node_arguments in zip(self._pipes, arguments, strict=True):
            pipe.send((method, node_arguments))
        answers = [pipe.recv() for pipe in self._pipes]
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers


class _NodeProcess:
    def __init__(self, name: str, root: str, parameters: tuple[Parameter, ...], seed: int) -> None:
        self._name = name
        self._parameters = parameters
        self._state = random_state(parameters, seed)
        self._store = SegmentStore(Path(root), "none")
        self._server = DataServer(self._store, SECRET, "127.0.0.1")
        self._tensors: dict[int, np.ndarray] = {}

    def hold(self, mesh: Mesh, held: list[tuple[int, Place]]) -> list[Origin]:
        store, origins = self._store.for_mesh(mesh_tag(mesh)), []
        for rank, place in held:
            layout = layout_of(self._parameters, mesh, rank)
            segment = store.ensure(rank, place, layout)
            slot = segment.begin(STEP)
            fill(slot, layout, self._state)
            digest = payload_digest(slot)
            segment.commit(attempt=ATTEMPT, step=STEP, digest=digest)
            origins.append(Origin(rank, self._name, place, "127.0.0.1", self._server.port, digest))
        return origins

    def prepare(self, mesh: Mesh, ranks: list[int]) -> None:
        """Allocate the tensors and the segment, as a rank has them after building its model."""
        sizes = {rank: layout_of(self._parameters, mesh, rank).payload_bytes for rank in ranks}
        self._tensors = {rank: np.ones(size, np.uint8) for rank, size in sizes.items()}
        store = self._store.for_mesh(mesh_tag(mesh))
        for rank in ranks:
            store.ensure(rank, Place.OWN, layout_of(self._parameters, mesh, rank))

    def reshard(self, source: Restore, mesh: Mesh, ranks: list[int]) -> None:
        with ThreadPoolExecutor(max(1, len(ranks))) as pool:
            list(pool.map(lambda rank: self._restore_rank(source, mesh, rank), ranks))

    def wrong(self, mesh: Mesh) -> list[int]:
        found = []
        for rank, tensors in self._tensors.items():
            layout = layout_of(self._parameters, mesh, rank)
            expected = np.empty(layout.payload_bytes, np.uint8)
            fill(expected.data, layout, self._state)
            if payload_digest(expected.data) != payload_digest(tensors.data):
                found.append(rank)
        return found

    def free(self) -> None:
        self._tensors = {}
        self._store.free_all()

    def _restore_rank(self, source: Restore, mesh: Mesh, rank: int) -> None:
        """The steps that a worker and its agent perform together."""
        store = self._store.for_mesh(mesh_tag(mesh))
        Reshard(SECRET, self._name, source, rank, store).run(OWN, TIMEOUT_S)
        segment = store.find(rank, Place.OWN)
        commit = segment.find(ATTEMPT, STEP) if segment else None
        assert segment is not None
        assert commit is not None
        assert segment.verify(commit)
        self._tensors[rank][:] = np.frombuffer(segment.payload(commit), np.uint8)


def _node(
    name: str, root: str, parameters: tuple[Parameter, ...], seed: int, pipe: Connection
) -> None:
    node = _NodeProcess(name, root, parameters, seed)
    while True:
        method, arguments = pipe.recv()
        try:
            pipe.send(getattr(node, method)(*arguments))
        except Exception as error:
            pipe.send(error)
