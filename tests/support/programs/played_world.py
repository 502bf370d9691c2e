"""A world of processes that run a script, whose launcher the test plays: real processes with the
environment of torchrun, attached through real sockets."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from holdfast_workers.errors import WorkersError
from holdfast_workers.ipc import control_channel
from holdfast_workers.progress import beacon
from holdfast_workers.protocol.messages import Restore, Tier
from holdfast_workers.protocol.programs import (
    PROGRAM_MESSAGES,
    SOCKET_VARIABLE,
    ProgramMessage,
    ProgramPlace,
    ProgramStep,
    StopWanted,
)

END_S = 120.0


class PlayedWorld:
    """The processes of one attempt, and all messages that they sent."""

    def __init__(
        self,
        folder: Path,
        arguments: Sequence[str],
        *,
        ranks: int = 2,
        environment: Mapping[str, str] | None = None,
        attached: bool = True,
        stop_wanted_at: Mapping[int, int] | None = None,
    ) -> None:
        """`stop_wanted_at`: rank -> the step after whose report it is asked to stop."""
        self.messages: dict[int, list[ProgramMessage]] = {rank: [] for rank in range(ranks)}
        self._stop_wanted_at = dict(stop_wanted_at or {})
        self._listeners: list[socket.socket] = []
        self._processes: list[subprocess.Popen[str]] = []
        self._threads: list[threading.Thread] = []
        port = free_port()
        folder.mkdir(parents=True, exist_ok=True)
        for rank in range(ranks):
            place = {
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "LOCAL_WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "TORCHELASTIC_RUN_ID": "test",
                **(environment or {}),
            }
            if attached:
                place[SOCKET_VARIABLE] = self._listen(folder, rank, ranks)
            self._processes.append(
                subprocess.Popen(
                    [sys.executable, *arguments],
                    env=place,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )

    def wait(self) -> list[str]:
        """What each rank printed. Raises AssertionError if a rank failed."""
        said = [process.communicate(timeout=END_S)[0] for process in self._processes]
        codes = [process.returncode for process in self._processes]
        assert codes == [0] * len(codes), "\n".join(said)
        for thread in self._threads:
            thread.join(END_S)
        return said

    def steps(self, rank: int) -> list[ProgramStep]:
        return [message for message in self.messages[rank] if isinstance(message, ProgramStep)]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()
        for listener in self._listeners:
            listener.close()

    def _listen(self, folder: Path, rank: int, ranks: int) -> str:
        name = f"holdfast-test-{uuid.uuid4().hex}"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(f"\0{name}")
        listener.listen()
        path = folder / f"beacon-{rank}"
        path.unlink(missing_ok=True)
        beacon.create(path)
        place = ProgramPlace(
            job_id="job",
            attempt=1,
            rank=rank,
            world_size=ranks,
            beacon=str(path),
            segment_path=str(folder / f"own-{rank}"),
            restore=Restore(Tier.INIT, 0),
        )
        thread = threading.Thread(target=self._serve, args=(listener, rank, place), daemon=True)
        thread.start()
        self._listeners.append(listener)
        self._threads.append(thread)
        return name

    def _serve(self, listener: socket.socket, rank: int, place: ProgramPlace) -> None:
        try:
            link, _ = listener.accept()
        except OSError:
            return
        with link:
            control_channel.send(link, place)
            while True:
                try:
                    message: ProgramMessage = control_channel.receive(link, *PROGRAM_MESSAGES)
                except (WorkersError, OSError):
                    return
                self.messages[rank].append(message)
                at = self._stop_wanted_at.get(rank)
                if isinstance(message, ProgramStep) and message.step == at:
                    control_channel.send(link, StopWanted())


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@contextmanager
def played_world(
    folder: Path,
    arguments: Sequence[str],
    *,
    ranks: int = 2,
    environment: Mapping[str, str] | None = None,
    attached: bool = True,
    stop_wanted_at: Mapping[int, int] | None = None,
) -> Iterator[PlayedWorld]:
    world = PlayedWorld(
        folder,
        arguments,
        ranks=ranks,
        environment=environment,
        attached=attached,
        stop_wanted_at=stop_wanted_at,
    )
    try:
        yield world
    finally:
        world.close()
