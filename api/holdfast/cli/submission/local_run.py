"""`run --local`: a server with a cluster on this machine, for one command.

Whatever it started has ended when the command has; its data folder stays.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.status import Status
from rich.text import Text

from holdfast.cli.dashboard import dashboard_link
from holdfast.cli.jobs import print_outcome
from holdfast.cli.own_servers import choice_of
from holdfast.cli.printing import output
from holdfast.cli.submission import interruption
from holdfast.cli.submission.job_follower import JobFollower
from holdfast.cli.submission.rank_output import RankOutput
from holdfast.client.synchronous.jobs import Client
from holdfast.errors import Conflict, HoldfastError
from holdfast_service import extras
from holdfast_service.job_model.program_levels import ProgramLevel
from holdfast_service.views.jobs import JobView
from holdfast_workers.node_cache import use_locks

NODES_S = 60.0
RETRY_S = 10.0
LOOK_S = 0.1
OUTPUT_LOG = "output.log"


class NoRunFolder(HoldfastError, code="no_run_folder", status=400):
    """No folder can be made for the run."""


class NodesMissing(HoldfastError, code="nodes_missing"):
    """The server does not list the nodes of its cluster."""


@dataclass(frozen=True)
class LocalServer:
    """A server of this command. `folder`: its data, and the output of the run."""

    client: Client
    folder: Path


@contextmanager
def local_server(nodes: int, name: str, data_dir: Path | None) -> Iterator[LocalServer]:
    """A server with a cluster of `nodes`, ended with the block, and with this process.

    `data_dir`: where the folder of this run is made; None: in the user's cache. Raises
    MissingExtra, NoRunFolder, ServerDidNotStart, ServerEnded, NodesMissing.
    """
    extras.require_server()
    from holdfast.local_server.child_server import child_server  # late: it is part of the server

    interruption.install("interrupted")
    with _run_folder(name, data_dir) as folder, _told(folder):
        shown = _StartDisplay(folder, nodes)
        with (
            shown,
            child_server(folder, nodes, shown.look) as server,
            Client(server.address, data_dir=folder, retry_s=RETRY_S) as client,
        ):
            _await_nodes(client, nodes)
            shown.end(dashboard_link(server.address, client.session_code().code))
            try:
                yield LocalServer(client, folder)
            finally:
                output.progress("ending the server of this run")


def cancel(client: Client, job: JobView, follower: JobFollower, *, ranks: RankOutput) -> None:
    """Cancel the job and follow it to its end, with the follower that has shown it: its program
    gets the time to save. Another Ctrl-C raises KeyboardInterrupt."""
    asked = time.time()
    with contextlib.suppress(Conflict):  # it has just ended
        job = client.cancel(job.id)
        output.progress(f"{time_to_save(job)}; Ctrl-C again ends it at once")
    job = follower.follow(job.id, ranks)
    print_outcome(job, client.verdict(job.id), output.stderr(), is_traceback_shown=True)
    if (hint := late_end(job, asked)) is not None:
        output.progress(hint)


def time_to_save(job: JobView) -> str:
    """How long a job that was cancelled has to save its state."""
    grace_s = job.spec["program"]["grace_s"]
    match job.level:
        case None:
            return "the program has not started"
        case ProgramLevel.SCRIPT:
            return f"the program gets SIGTERM, and {grace_s:g} s later SIGKILL"
        case ProgramLevel.CONTEXT:
            return (
                f"its last step is saved, in {job.spec['checkpoint']['final_save_s']:g} s at most"
            )
    return (
        f"the program is asked to save and end (`should_stop`); {grace_s:g} s later it gets "
        f"SIGTERM, and {2 * grace_s:g} s later SIGKILL"
    )


def late_end(job: JobView, asked: float) -> str | None:
    """What to do about a program that went on until SIGTERM. `asked`: Unix time of the wish."""
    grace_s = job.spec["program"]["grace_s"]
    is_asked = job.level in (ProgramLevel.PLUGIN, ProgramLevel.MEMORY_TIER)
    if not is_asked or job.ended_at is None or job.ended_at < asked + grace_s:
        return None
    return (
        f"the program did not end within {grace_s:g} s of being asked, so it got SIGTERM: let it "
        "read `job.should_stop` after each step, save and leave its loop (docs/bring.md)"
    )


class _StartDisplay:
    """Shows what the server that starts is doing: live on a terminal, else a line per stage."""

    def __init__(self, folder: Path, nodes: int) -> None:
        from holdfast.local_server.child_server import stage  # late: it is part of the server

        self._folder = folder
        self._stage: Callable[[], str] = partial(stage, folder, nodes)
        self._console = output.stderr()
        self._began = time.monotonic()
        self._last = ""
        self._live = _live(self._console)

    def __enter__(self) -> None:
        if self._live is not None:
            self._live.start()
        self.look()

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self._stop()

    def look(self) -> None:
        found = self._stage()
        if self._live is not None:
            self._live.update(Text(f"{found} ({time.monotonic() - self._began:.0f} s)"))
        elif found != self._last:
            self._console.print(found)
        self._last = found

    def end(self, link: str) -> None:
        self._stop()
        took = output.seconds(time.monotonic() - self._began)
        self._console.print(f"the server of this run is ready after {took}; its dashboard:")
        self._console.print(link, soft_wrap=True)
        self._console.print(f"its output and files: {self._folder}")
        self._console.print("for `holdfast ls`, `top` and others in a second terminal, type there:")
        self._console.print(f"  {choice_of(self._folder)}")

    def _stop(self) -> None:
        if self._live is not None:
            self._live.stop()


def _live(console: Console) -> Status | None:
    return console.status("") if console.is_terminal else None


@contextmanager
def _run_folder(name: str, data_dir: Path | None) -> Iterator[Path]:
    from holdfast.local_server import run_folders  # late: it is part of the server
    from holdfast_workers.node_cache.cached_file import NoCacheFolder

    now = time.time()
    try:
        if data_dir is None:
            data_dir = run_folders.default_parent()
            run_folders.remove_old(data_dir, now)
        made = run_folders.make(data_dir, name, now)
    except (OSError, NoCacheFolder) as error:
        raise NoRunFolder(
            f"no folder for this run can be made: {error}; name another place with --data-dir"
        ) from error
    with use_locks.held(made):
        yield made


@contextmanager
def _told(folder: Path) -> Iterator[None]:
    try:
        yield
    finally:
        output.progress(f"output and files of this run: {folder}")


def _await_nodes(client: Client, nodes: int) -> None:
    """Wait until the server knows the nodes: what each rank gets depends on them."""
    deadline = time.monotonic() + NODES_S
    while sum(node.there for node in client.nodes()) < nodes:
        if time.monotonic() > deadline:
            raise NodesMissing(f"the server has not listed its nodes within {NODES_S:.0f} s")
        time.sleep(LOOK_S)
