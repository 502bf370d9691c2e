"""Writes a mutation into its file, runs a suite's commands, and takes the mutation back.

The file is restored, with its times, before anything else ends: compiled modules of the mutation
are then out of date, and a slow end of the suite cannot keep the mutation in the checkout. Signals
only set a flag that every wait looks at, so none interrupts the restoring.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from tests.mutation.mutants import apply
from tests.mutation.rooms import PRODUCT, read_source
from tests.mutation.selection import Mutation
from tests.mutation.suites import environment
from tests.mutation.verdicts import Outcome, Result, Verdict, verdict

END_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
POLL_S = 0.1
CLEANUP_S = 20.0
"""For the fixtures of a suite that is ended."""


class UncommittedChanges(Exception):
    """The product differs from what is committed."""


class CommitMeanwhile(Exception):
    """Somebody has committed while a mutation was in the checkout."""


@dataclass
class EndRequest:
    """The signal that asked this program to end, if there was one."""

    received: list[int] = field(default_factory=list)

    def check(self) -> None:
        """Raises SystemExit after a signal."""
        if self.received:
            raise SystemExit(128 + self.received[0])


@contextmanager
def end_request() -> Iterator[EndRequest]:
    """Meanwhile signals end nothing: `check` does."""
    request = EndRequest()

    def note(number: int, _: FrameType | None) -> None:
        request.received.append(number)

    former = {number: signal.signal(number, note) for number in END_SIGNALS}
    try:
        yield request
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def require_committed(root: Path) -> None:
    """Raises UncommittedChanges."""
    status = ["git", "status", "--porcelain", "--", *PRODUCT]
    changed = subprocess.run(status, cwd=root, check=True, capture_output=True, text=True).stdout
    if changed:
        raise UncommittedChanges(
            "commit first: a mutation is written into the files and taken back, and these have "
            f"uncommitted changes:\n{changed.rstrip()}"
        )


def require_untouched(root: Path, commit: str, mutation: Mutation) -> None:
    """Raises CommitMeanwhile unless the checkout is still at `commit`, from before the mutation."""
    if (current := head(root)) != commit:
        raise CommitMeanwhile(
            f"{current} was committed while {mutation.path} was mutated: its line "
            f"{mutation.site.line} is restored in the checkout, but look whether that commit has "
            f"the mutation (git diff {current} -- {mutation.path}), and commit the line again"
        )


def head(root: Path) -> str:
    """The commit of the checkout."""
    command = ["git", "rev-parse", "HEAD"]
    return subprocess.run(
        command, cwd=root, check=True, capture_output=True, text=True
    ).stdout.strip()


def try_mutation(
    root: Path,
    mutation: Mutation,
    commands: Sequence[Sequence[str]],
    limit_s: float,
    request: EndRequest,
) -> Result:
    """Run `commands` with the mutation until one fails, or `limit_s` has passed. Raises SystemExit
    after a signal, SuiteFault if a command could not run, ValueError if the file has changed."""
    request.check()
    path = root / mutation.path
    mutated = apply(read_source(path), mutation.site)
    began = time.monotonic()
    found = Verdict(Outcome.SURVIVED)
    with ExitStack() as processes, written(path, mutated):
        for command in commands:
            found = _run(command, root, began + limit_s, request, processes)
            if found.outcome is not Outcome.SURVIVED:
                break
    return Result(mutation, found, time.monotonic() - began)


@contextmanager
def written(path: Path, contents: str) -> Iterator[None]:
    """Meanwhile `path` has these contents; afterwards its own, with their times."""
    original, times = path.read_bytes(), path.stat()
    try:
        path.write_bytes(contents.encode())
        yield
    finally:
        path.write_bytes(original)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def _run(
    command: Sequence[str], root: Path, deadline: float, request: EndRequest, processes: ExitStack
) -> Verdict:
    """The verdict of a command. `processes` ends what is left of it."""
    output = tempfile.TemporaryFile()  # noqa: SIM115 (closed with `processes`)
    processes.callback(output.close)
    process = subprocess.Popen(
        command,
        cwd=root,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    processes.callback(_end_group, process)
    while time.monotonic() < deadline:
        request.check()
        try:
            exit_code = process.wait(POLL_S)
        except subprocess.TimeoutExpired:
            continue
        output.seek(0)
        return verdict(exit_code, output.read().decode(errors="replace"))
    return Verdict(Outcome.UNDECIDED)


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End the processes of a command: with time to clean up, if it still runs."""
    if process.poll() is None:
        _signal_group(process, signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(CLEANUP_S)
    _signal_group(process, signal.SIGKILL)
    process.wait()


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with suppress(ProcessLookupError):  # all have ended
        os.killpg(process.pid, number)
