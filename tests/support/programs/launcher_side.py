"""The launcher's side of an attachment, played by a test: it gives a program its place, says
whether its state has arrived, and records what it reports."""

from __future__ import annotations

import contextlib
import socket
import threading
import uuid
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from tests.support.waiting import DEADLINE_S

from holdfast_workers.errors import WorkersError
from holdfast_workers.ipc import control_channel
from holdfast_workers.memory.segment import Segment
from holdfast_workers.progress import beacon
from holdfast_workers.protocol.messages import Restore, Tier
from holdfast_workers.protocol.processes import StateReply, StepReplicated
from holdfast_workers.protocol.programs import (
    PROGRAM_MESSAGES,
    ProgramMessage,
    ProgramPlace,
    ProgramSaved,
    StateTaken,
)

NOTHING = Restore(Tier.INIT, 0)


class LauncherSide:
    """One rank's launcher. `socket_name` goes into the program's environment. `replicates`: every
    step that is saved or taken is reported as held by the partners at once; `problem`: why there is
    no state."""

    def __init__(
        self,
        place: ProgramPlace,
        *,
        replicates: bool = True,
        problem: str = "",
        delay_s: float = 0.0,
    ) -> None:
        self.socket_name = f"holdfast-test-{uuid.uuid4().hex}"
        self.place = place
        self.messages: list[ProgramMessage] = []
        self._replicates = replicates
        self._problem = problem
        self._delay_s = delay_s
        self._changed = threading.Condition()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(f"\0{self.socket_name}")
        self._listener.listen()
        self._link: socket.socket | None = None
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def __enter__(self) -> LauncherSide:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        if self._link is not None:
            with contextlib.suppress(OSError):
                self._link.shutdown(socket.SHUT_RDWR)
        self._thread.join(DEADLINE_S)

    @property
    def saved(self) -> list[int]:
        return [each.step for each in self.messages if isinstance(each, ProgramSaved)]

    @property
    def taken(self) -> list[int]:
        return [each.step for each in self.messages if isinstance(each, StateTaken)]

    def wait_for(self, message: ProgramMessage) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: message in self.messages, DEADLINE_S)

    def send(self, message: object) -> None:
        assert self._link is not None
        control_channel.send(self._link, message)

    def _send_if_open(self, message: object) -> None:
        with contextlib.suppress(WorkersError):
            self.send(message)

    def _serve(self) -> None:
        try:
            self._link, _ = self._listener.accept()
            control_channel.send(self._link, self.place)
            if self.place.restore.tier in (Tier.OWN_RAM, Tier.PARTNER_RAM):
                self.send(StateReply(self.place.attempt, self._problem))
            while True:
                self._take(control_channel.receive(self._link, *PROGRAM_MESSAGES))
        except (WorkersError, OSError):
            return  # the program has ended, or the test

    def _take(self, message: ProgramMessage) -> None:
        if isinstance(message, ProgramSaved | StateTaken) and self._replicates:
            with Segment.open(Path(self.place.segment_path), writable=False) as segment:
                digests = [each.digest for each in segment.commits() if each.step == message.step]
            reply = StepReplicated(self.place.attempt, message.step, *digests[:1])
            threading.Timer(self._delay_s, self._send_if_open, [reply]).start()
        with self._changed:
            self.messages.append(message)
            self._changed.notify_all()


def place_in(
    folder: Path, rank: int, world_size: int, attempt: int = 1, restore: Restore = NOTHING
) -> ProgramPlace:
    """The place of a rank whose segment lies in a folder of its own: its node's."""
    node = folder / f"node-{rank}" / f"world={world_size}"
    node.mkdir(parents=True, exist_ok=True)
    signs = node / f"beacon-{attempt}"
    beacon.create(signs)
    return ProgramPlace(
        job_id="job",
        attempt=attempt,
        rank=rank,
        world_size=world_size,
        beacon=str(signs),
        segment_path=str(node / f"own-{rank}.seg"),
        restore=restore,
        has_partner=True,
    )


def on_one_node(place: ProgramPlace) -> ProgramPlace:
    """The same rank, with its segment in the folder of rank 0's node."""
    path = Path(place.segment_path)
    node = path.parents[1].with_name("node-0") / path.parent.name
    node.mkdir(parents=True, exist_ok=True)
    return replace(place, segment_path=str(node / path.name))
