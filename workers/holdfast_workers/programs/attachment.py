"""The program's side of its launcher: what `holdfast.attach()` returns.

In a process that Holdfast started, directly or through others, the attachment shows the program's
steps and carries its memory checkpoints. Anywhere else it is inactive, and no call has an effect:
the same script runs under torchrun or plain Python.
"""

from __future__ import annotations

import atexit
import math
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast_workers.errors import WorkersError
from holdfast_workers.ipc import control_channel
from holdfast_workers.progress import beacon as beacons
from holdfast_workers.progress.beacon import Beacon
from holdfast_workers.protocol.processes import PartnerPresence, StateReply, StepReplicated
from holdfast_workers.protocol.programs import (
    LAUNCHER_MESSAGES,
    SOCKET_VARIABLE,
    Attached,
    ProgramMessage,
    ProgramPlace,
    ProgramSaved,
    ProgramStep,
    StateTaken,
    StopWanted,
)

if TYPE_CHECKING:
    from holdfast_workers.functions.context import Context

CONNECT_TIMEOUT_S = 10.0
LONGEST_STEPS = 5.0
"""A step may take this many times as long as the longest before it."""
KEPT_REPORTS = 8
"""Number of steps of which it is known whether the partners hold them; a segment has two."""
STEP_PHASE = "step"
"""The phase of the beacon between two calls of `step`."""


class NoContext(WorkersError):
    """The process is no rank of a job whose script trains in the steps of a context."""


class LauncherGone(WorkersError):
    """The launcher did not answer."""


class Attachment:
    """One process's attachment. Thread-safe but for `step`, which one thread calls."""

    def __init__(self, link: socket.socket | None = None, integration: str = "") -> None:
        """`link`: connected to the launcher; None: inactive."""
        self._link = link
        self._place: ProgramPlace | None = None
        self._beacon: Beacon | None = None
        self._sending = threading.Lock()
        self._changed = threading.Condition()
        self._stop_wanted = False
        self._state: StateReply | None = None
        self._replicated: dict[int, str] = {}
        """The digests of the newest steps that all partners hold."""
        self._has_partner = False
        self._last_step_at = time.monotonic()
        self._first_step = sys.maxsize
        self._longest_s = 0.0
        self._blocked_ns = 0
        self._step = 0
        self._pid = os.getpid()
        self._context: Context | None = None
        if link is not None:
            self._start(link, integration)

    # --- place ----------------------------------------------------------------------------------

    @property
    def active(self) -> bool:
        """Whether Holdfast started this process as a program with a loop of its own."""
        return self._place is not None

    @property
    def place(self) -> ProgramPlace | None:
        """Rank, attempt and the place of memory checkpoints; None if inactive."""
        return self._place

    @property
    def attempt(self) -> int:
        """The number of the attempt, from 1; it grows with every restart. 0 if inactive."""
        if self._context is not None:
            return self._context.attempt
        return self._place.attempt if self._place else 0

    @property
    def rank(self) -> int:
        """The rank as launched; without Holdfast the variable `RANK`, or 0."""
        if self._context is not None:
            return self._context.rank
        return self._place.rank if self._place else int(os.environ.get("RANK", "0"))

    @property
    def world_size(self) -> int:
        """The world size as launched; without Holdfast the variable `WORLD_SIZE`, or 1."""
        if self._context is not None:
            return self._context.world_size
        return self._place.world_size if self._place else int(os.environ.get("WORLD_SIZE", "1"))

    # --- the context ----------------------------------------------------------------------------

    @property
    def context(self) -> Context:
        """The context of this attempt: mesh, data and steps, as a `function` gets them. Raises
        NoContext in a process without one, which a spec with `program.context: true` gives."""
        if self._context is None:
            raise NoContext(
                "this process has no training context: set `program.context: true` in the spec of "
                "its job, or try the job without a cluster by `python -m "
                "holdfast_workers.standalone JOB.yaml`, also under torchrun"
            )
        return self._context

    def register(self, **parts: Any) -> Context:
        """Register parts of the state by name with the context, and return it. Raises NoContext,
        and FunctionError for what cannot be registered."""
        context = self.context
        context.register(**parts)
        return context

    @contextmanager
    def offering(self, context: Context) -> Iterator[None]:
        """Give the process this context inside of the block."""
        self._context = context
        try:
            yield
        finally:
            self._context = None

    # --- progress -------------------------------------------------------------------------------

    def step(
        self,
        step: int,
        *,
        loss: float | None = None,
        grad_norm: float | None = None,
        lr: float | None = None,
        tokens: int = 0,
        **metrics: float,
    ) -> None:
        """Report that `step` steps are applied, with its metrics. Call it on every rank, once per
        step; a rank that makes no more steps is then found by its silence. Costs microseconds: do
        not read a loss from a device for it in every step.

        `tokens`: tokens or samples that all ranks consumed in this step.
        """
        if self._beacon is None or self._pid != os.getpid():  # a child, such as a data loader
            return
        now = time.monotonic()
        took_s, self._last_step_at = now - self._last_step_at, now
        self._beacon.cold = False
        if self._first_step == sys.maxsize:  # from now on this process shows the phases
            self._beacon.take_over()
            self._longest_s = took_s  # it includes what preceded the first step
        blocked_ns, self._blocked_ns = self._blocked_ns, self._beacon.blocked_ns
        if step > self._first_step:
            self._longest_s = max(self._longest_s, took_s)
            blocked_s = (self._blocked_ns - blocked_ns) * 1e-9
            self._beacon.add_step_time(max(0.0, took_s - blocked_s))
        self._first_step = min(self._first_step, step)
        self._step = step
        self._beacon.enter(STEP_PHASE, step + 1, bound_s=self._step_bound_s())
        self._send(
            ProgramStep(
                step=step,
                at=time.time(),
                step_time_s=took_s,
                loss=_finite(loss),
                grad_norm=_finite(grad_norm),
                lr=_finite(lr),
                tokens=tokens,
                own={name: float(value) for name, value in metrics.items()},
            )
        )

    def alive(self) -> None:
        """Show a sign of life within a step that takes long, such as an evaluation or a save."""
        if self._shows_phases and self._beacon is not None:
            self._beacon.enter(STEP_PHASE, self._step + 1, bound_s=self._step_bound_s())

    @property
    def should_stop(self) -> bool:
        """Whether the program is asked to save its state and to return: the job is paused or
        cancelled, or its node is about to go."""
        return self._stop_wanted

    # --- memory checkpoints ---------------------------------------------------------------------

    def wait_state(self, timeout_s: float) -> StateReply:
        """Wait until the state that the attempt starts from lies in this rank's segment, or until
        it is known that it does not (`problem`). Call it only if `place.restore` names a state."""
        with self._changed:
            self._changed.wait_for(lambda: self._state is not None, timeout_s)
            late = f"the state did not arrive within {timeout_s:g} s"
            return self._state or StateReply(self.attempt, late)

    def report_saved(self, step: int, protected: int = -1) -> None:
        """This rank's segment contains a commit of `step`, made by this attempt. `protected`: a
        step that the partners of every rank hold; -1: not known."""
        self._send(ProgramSaved(step, protected))

    @property
    def has_partner(self) -> bool:
        """Whether the rank has partners now, which keep copies of its memory checkpoints."""
        return self._has_partner

    def report_taken(self, step: int) -> None:
        """This rank goes on from the commit of `step` in its segment."""
        self._send(StateTaken(step))

    def is_replicated(self, step: int, digest: str, timeout_s: float = 0.0) -> bool:
        """Whether all partners of this rank hold the commit of `step` that has `digest`; waits for
        it up to `timeout_s`. True at once without a partner."""
        with self._changed:
            return self._changed.wait_for(
                # An agent of an earlier build names no digest.
                lambda: not self._has_partner or self._replicated.get(step) in ("", digest),
                timeout_s,
            )

    # --- internals ------------------------------------------------------------------------------

    def _start(self, link: socket.socket, integration: str) -> None:
        link.settimeout(CONNECT_TIMEOUT_S)
        try:
            place = control_channel.receive(link, ProgramPlace)
        except control_channel.ControlClosed:
            return  # another process of this rank is attached: this one is its child
        except (WorkersError, TimeoutError) as error:
            raise LauncherGone(f"Holdfast's launcher did not answer: {error}") from error
        link.settimeout(None)
        self._place, self._stop_wanted = place, place.stop_wanted
        self._has_partner = place.has_partner
        self._send(Attached(integration))
        self._beacon = beacons.current()  # of a forked script: it counts the collectives too
        if self._beacon is None:
            self._beacon = Beacon(Path(place.beacon))
            self._beacon.begin(place.attempt)
            self._beacon.make_current()
        threading.Thread(target=self._listen, name="holdfast-attach", daemon=True).start()
        atexit.register(self._end)

    def _listen(self) -> None:
        assert self._link is not None
        try:
            while True:
                self._handle(control_channel.receive(self._link, *LAUNCHER_MESSAGES))
        except (WorkersError, OSError):
            return  # the launcher ends this process, or has ended

    def _handle(self, message: Any) -> None:
        with self._changed:
            match message:
                case StopWanted():
                    self._stop_wanted = True
                case StateReply():
                    self._state = message
                case StepReplicated(step=step, digest=digest):
                    self._replicated.pop(step, None)
                    self._replicated[step] = digest
                    if len(self._replicated) > KEPT_REPORTS:
                        del self._replicated[next(iter(self._replicated))]
                    self._has_partner = True  # a failed partner has recovered
                case PartnerPresence(present=present):
                    self._has_partner = present
                    self._replicated.clear()  # it was about the former partners
            self._changed.notify_all()

    def _step_bound_s(self) -> float:
        """A step may hold an evaluation or a save, of which no limit is learned."""
        assert self._place is not None
        return max(self._place.step_bound_s, LONGEST_STEPS * self._longest_s)

    def _send(self, message: ProgramMessage) -> None:
        if self._link is None or self._place is None:
            return
        try:
            with self._sending:
                control_channel.send(self._link, message)
        except control_channel.ControlClosed:
            pass  # the launcher has ended, and this process is about to

    def _end(self) -> None:
        if self._shows_phases and self._beacon is not None:
            assert self._place is not None
            self._beacon.enter("exit", self._step, bound_s=self._place.start_bound_s)

    @property
    def _shows_phases(self) -> bool:
        """Whether this process shows the phases of its rank: since its first step."""
        return self._first_step < sys.maxsize and self._pid == os.getpid()


_attached: Attachment | None = None
_attaching = threading.Lock()


def attach(integration: str = "") -> Attachment:
    """The attachment of this process, the same at every call; inactive outside of Holdfast, and
    with a warning where the launcher cannot be reached: in a container, or after its end. Raises
    LauncherGone if it can be reached and does not answer."""
    global _attached  # noqa: PLW0603  (there is one launcher per process)
    with _attaching:
        if _attached is None:
            name = os.environ.get(SOCKET_VARIABLE, "")
            link = _connect(name) if name else None
            _attached = Attachment(link, integration)
        return _attached


def _connect(name: str) -> socket.socket | None:
    """A connection to the launcher; None, with a warning, if it cannot be reached."""
    link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link.settimeout(CONNECT_TIMEOUT_S)
    try:
        link.connect(f"\0{name}")
        _refuse_other_users(link)
    except OSError as error:
        link.close()
        print(
            "holdfast: this process runs as if without Holdfast: its launcher cannot be reached "
            f"at {SOCKET_VARIABLE}={name}: {error}. If it is a rank, start it in the network "
            "namespace of the node agent; if not, unset the variable",
            file=sys.stderr,
            flush=True,
        )
        return None
    return link


def _refuse_other_users(link: socket.socket) -> None:
    """The name is no secret: once the launcher has ended, any user may take it. Raises OSError."""
    credentials = struct.Struct("3i")
    raw = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size)
    if credentials.unpack(raw)[1] != os.getuid():
        raise PermissionError("another user listens there")


def _finite(value: float | None) -> float | None:
    if value is None:
        return None
    number = float(value)
    return number if math.isfinite(number) else None
