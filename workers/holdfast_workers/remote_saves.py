"""A node's part in the remote tier: savers that write shards, finalizers that publish.

Owns the frozen copies that workers leave for savers, from the moment they are handed over. What
a worker left without handing it over, because it died, is removed at the next fence.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from holdfast_workers import copies, processes
from holdfast_workers.agent_config import AgentConfig
from holdfast_workers.checkpoint.manifest import checkpoint_folder
from holdfast_workers.children import Brood, Child, ZygoteFailed
from holdfast_workers.messages import SignalKind
from holdfast_workers.node_io import NodeIO
from holdfast_workers.signalling import Teller

KEPT_SHARDS = 256


class RemoteSaves:
    """Thread-safe."""

    def __init__(self, config: AgentConfig, root: Path, brood: Brood, teller: Teller) -> None:
        self._config = config
        self._root = root
        self._brood = brood
        self._teller = teller
        self._lock = threading.Lock()
        self._copies: set[str] = set()
        self._shards: list[dict[str, Any]] = []

    @property
    def shards(self) -> tuple[dict[str, Any], ...]:
        """Records of shards that are durable and not known to be in a manifest."""
        with self._lock:
            return tuple(self._shards)

    def hand_over(self, message: dict[str, Any]) -> dict[str, Any]:
        """Take charge of the copy that a worker's `save` message names; the request to `save`."""
        with self._lock:
            self._copies.add(message["path"])
        step, attempt = message["step"], message["attempt"]
        return {
            "path": message["path"],
            "folder": str(self._folder(step, attempt)),
            "rank": message["rank"],
            "attempt": attempt,
            "step": step,
        }

    def save(self, request: dict[str, Any], io: NodeIO) -> None:
        """Fork the saver of one shard; signals tell how it ends."""
        try:
            io.watch(self._brood.fork("saver", f"saver-{request['rank']}", dict(request)))
        except ZygoteFailed as error:
            self._failed(request, str(error))

    def saved(self, child: Child, message: dict[str, Any]) -> None:
        """A saver says that its shard is durable."""
        child.request["saved"] = True
        attempt = child.request["attempt"]
        shard = {**{key: message[key] for key in ("rank", "step", "nbytes")}, "attempt": attempt}
        with self._lock:
            self._shards = [*self._shards, shard][-KEPT_SHARDS:]
        self._teller.tell(SignalKind.SHARD_SAVED, attempt, shard["rank"], detail=shard)

    def exited(self, child: Child, detail: dict[str, int | str]) -> None:
        """A saver's process is gone."""
        if child.request.get("saved"):
            self._let_go(child.request)
        else:
            self._failed(child.request, f"the saver ended: {detail}")

    def finalize(self, step: int, attempt: int, keep: int, io: NodeIO) -> dict[str, Any]:
        """Publish the checkpoint of `step`: its folder, size and what retention removed.

        Raises ZygoteFailed, TimeoutError, or ChildProcessError with the finalizer's log.
        """
        folder = self._folder(step, attempt)
        request = {
            "folder": str(folder),
            "step": step,
            "attempt": attempt,
            "world_size": self._config.world_size,
            "mesh": self._config.mesh,
            "extra": {"job": self._config.job_id, "training": self._config.training},
            "keep": keep,
        }
        child = self._brood.fork("finalizer", f"finalizer-{step}", request)
        answer = io.run_to_end(child, self._config.finalize_timeout_s)
        with self._lock:
            self._shards = [s for s in self._shards if (s["step"], s["attempt"]) != (step, attempt)]
        return {"uri": str(folder), "step": step, "attempt": attempt, **answer}

    def fence(self, attempt: int) -> None:
        """Call when no worker of an older attempt is left: forget what will not be published."""
        with self._lock:
            self._shards = [shard for shard in self._shards if shard["attempt"] >= attempt]
            taken = set(self._copies)
        for path in self._root.glob(copies.PATTERN):
            if str(path) not in taken and copies.attempt_of(path) < attempt:
                path.unlink(missing_ok=True)
        self._remove_half_made()

    def remove_leftovers(self) -> None:
        """Remove what processes of an earlier life of this agent left."""
        for path in self._root.glob(copies.PATTERN):
            path.unlink(missing_ok=True)
        self._remove_half_made()

    def _remove_half_made(self) -> None:
        """Segments whose maker died before they had their name."""
        for path in (*self._root.glob(".*.new"), *self._root.glob("*/.*.new")):
            maker = int(path.suffixes[-2].removeprefix("."))
            if not processes.is_alive(maker):
                path.unlink(missing_ok=True)

    def _failed(self, request: dict[str, Any], why: str) -> None:
        self._let_go(request)
        detail = {"step": request["step"], "message": why}
        self._teller.tell(
            SignalKind.SHARD_FAILED, request["attempt"], request["rank"], detail=detail
        )

    def _let_go(self, request: dict[str, Any]) -> None:
        Path(request["path"]).unlink(missing_ok=True)
        with self._lock:
            self._copies.discard(request["path"])

    def _folder(self, step: int, attempt: int) -> Path:
        return checkpoint_folder(Path(self._config.remote_root), step, attempt)
