"""The launcher: a worker process that runs a user's program for each attempt that it joins.

One thread waits for everything: control messages of its agent, the program's end, its output, and
messages of the program if it attaches. The launcher itself computes nothing, so it always answers,
whatever the program does. A fence ends the program; so does the end of the launcher.

While the rank has no lease, the program and its group are stopped (SIGSTOP), and continued with the
next lease: another world may step meanwhile.
"""

from __future__ import annotations

import os
import resource
import selectors
import signal
import socket
import struct
import sys
import time
import uuid
from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING

import structlog

from holdfast_workers.errors import WorkersError
from holdfast_workers.fault_injection.kinds import Injection
from holdfast_workers.ipc import control_channel, linux_processes, readiness
from holdfast_workers.ipc.linux_processes import ProcessEnd
from holdfast_workers.programs import launcher_links
from holdfast_workers.programs.guard import start_guard
from holdfast_workers.programs.launcher_links import AgentLink, StoreEnded
from holdfast_workers.programs.output_relay import OutputRelay, RelayedText
from holdfast_workers.programs.program_attempt import ProgramAttempt
from holdfast_workers.programs.program_process import (
    ProgramLine,
    ProgramProcess,
    kill_descendants,
)
from holdfast_workers.protocol.lease import clock_s
from holdfast_workers.protocol.messages import ErrorKind, JoinOrder
from holdfast_workers.protocol.processes import (
    WORKER_ORDERS,
    ArmFault,
    AttemptsLeft,
    FaultFired,
    JoinAttempt,
    LeaseUpdate,
    LeaveAttempts,
    PartnerPresence,
    StateReply,
    StepReplicated,
    StopAfterStep,
    WorkerMessage,
    WorkerOrder,
    ZygoteConfig,
)
from holdfast_workers.protocol.programs import PROGRAM_MESSAGES, SOCKET_VARIABLE, ProgramMessage
from holdfast_workers.spec import TrainingSpec

if TYPE_CHECKING:
    from holdfast_workers.progress.beacon import Beacon

LOOK_S = 0.5
"""Time between two looks at a program that shows no steps."""
FENCE_GRACE_S = 1.0
"""Time between SIGTERM and SIGKILL for a program whose attempt is over."""
REST_POLL_S = 0.05
"""Time between two looks at the processes of a program that was asked to end."""
LAST_WAIT_S = 5.0
"""How long the end of a launcher waits for the end of what its program has started."""
LAST_OUTPUT_S = 5.0
"""How long the report of a program's end waits for the agent to read its last output."""
AGENT_READS_S = 60.0
"""How long the end of a launcher waits for its agent to read the last output. An agent that reads
nothing for so long is lost itself."""
_CREDENTIALS = struct.Struct("3i")
_log = structlog.get_logger()


class Launcher:
    """Runs one attempt after the other until its agent closes the control socket."""

    def __init__(
        self,
        end: socket.socket,
        config: ZygoteConfig,
        beacon: Beacon,
        node_devices: tuple[str, ...] = (),
    ) -> None:
        """`node_devices`: the devices of all ranks of the node."""
        self._end = end
        self._node_devices = node_devices
        self._config = config
        self._beacon = beacon
        self._spec = config.plan.spec
        self._line = line_of(self._spec)
        self._selector = selectors.DefaultSelector()
        self._name = f"holdfast-{uuid.uuid4().hex}"
        self._listener = _listen(self._name)
        self._attached: socket.socket | None = None
        self._store: socket.socket | None = None
        self._attempt: ProgramAttempt | None = None
        self._fence = 0
        self._lease = (0, 0.0)  # number, until when
        self._injected: set[int] = set()
        self._faults_waiting: list[ArmFault] = []
        self._timers: dict[str, tuple[float, Callable[[], None]]] = {}
        self._link = AgentLink(end)
        self._sending_end = os.dup(end.fileno())  # watched apart, for room to send
        self._relay = OutputRelay(self._take_output)
        self._ended_outputs: set[int] = set()
        self._all_asked = False
        """Whether not only the program was asked to end, but all that it has started too."""

    def run(self) -> int:
        start_guard(f"{SOCKET_VARIABLE}={self._name}")
        sys.stdout = RelayedText(self._relay)
        linux_processes.become_subreaper()
        self._beacon.end()
        self._watch(self._end, self._read_order)
        self._watch(self._listener, self._accept)
        try:
            while True:
                self._run_once()
        except control_channel.ControlClosed:  # the agent has ended
            kill_descendants(LAST_WAIT_S)
            return 0
        except BaseException:
            kill_descendants(LAST_WAIT_S)
            raise

    def _run_once(self) -> None:
        for key, _ in self._selector.select(self._pause_s()):
            if key.fd in self._selector.get_map():  # not unregistered by a call before it
                key.data()
        now = time.monotonic()
        for name, (due, call) in tuple(self._timers.items()):
            if due <= now and name in self._timers:
                del self._timers[name]
                call()
        self._wait_for_room()

    def _wait_for_room(self) -> None:
        """Wait for the agent to read where something waits for that, and only then."""
        for waits, descriptor, call in (
            (self._link.is_full, self._sending_end, self._link.flush),
            (self._relay.is_full, self._relay.target, self._read_output),
        ):
            watched = descriptor in self._selector.get_map()
            if waits and not watched:
                self._selector.register(descriptor, selectors.EVENT_WRITE, call)
            elif watched and not waits:
                self._selector.unregister(descriptor)
        process = self._attempt.process if self._attempt is not None else None
        if process is None or process.output in self._ended_outputs:
            return
        reads = process.output in self._selector.get_map()
        if self._relay.is_full and reads:
            self._selector.unregister(process.output)
        elif not self._relay.is_full and not reads:
            self._watch(process.output, self._read_output)

    # --- messages of the agent ------------------------------------------------------------------

    def _read_order(self) -> None:
        order: WorkerOrder = control_channel.receive(self._end, *WORKER_ORDERS)
        self._handle(order)

    def _handle(self, order: WorkerOrder) -> None:
        match order:
            case JoinAttempt(order=join, faults=faults):
                if join.attempt >= self._fence:
                    self._join(order)
                self._faults_waiting = list(faults)
                self._inject_waiting()
            case LeaveAttempts(attempt=attempt):
                self._leave(attempt)
            case LeaseUpdate(attempt=attempt, until=until, number=number):
                if self._attempt is not None and attempt == self._attempt.number:
                    self._take_lease(number, until)
            case StopAfterStep(attempt=attempt, leaves=leaves):
                if self._attempt is not None and attempt == self._attempt.number:
                    self._stop(leaves=leaves)
            case ArmFault():
                self._inject(order)
            case StateReply() | StepReplicated() | PartnerPresence():
                if self._attempt is not None and order.attempt == self._attempt.number:
                    self._attempt.pass_on(order)
            case _:
                pass  # of training steps, which a program has not

    def _join(self, order: JoinAttempt) -> None:
        self._fence = max(self._fence, order.order.attempt)
        self._lease = (0, 0.0)
        self._attempt = ProgramAttempt(
            order.order,
            self._config,
            self._spec,
            self._line,
            self._beacon,
            self._name,
            self._node_devices,
            self._send,
        )
        if order.order.form.leased:
            self._attempt.hold()
        else:
            self._start()

    def _start(self) -> None:
        attempt = self._attempt
        assert attempt is not None
        try:
            self._watch_store(attempt.order)
            process = attempt.start(self._private_descriptors())
        except StoreEnded as error:
            attempt.report_failure(error, ErrorKind.COMMUNICATION)
            return
        except OSError as error:
            self._close_store()
            attempt.report_failure(WorkersError(f"no process could be started: {error}"))
            return
        self._ended_outputs.clear()
        self._all_asked = False
        self._watch(process.output, self._read_output)
        self._watch(process.pidfd, self._handle_exit)
        self._inject_waiting()
        self._timers["look"] = (time.monotonic() + LOOK_S, self._look)

    def _take_lease(self, number: int, until: float) -> None:
        attempt = self._attempt
        if attempt is None or not attempt.order.form.leased or number <= self._lease[0]:
            return
        self._lease = number, until
        left_s = until - clock_s()
        if left_s <= 0:
            self._hold()
            return
        self._timers["lease"] = (time.monotonic() + left_s, self._hold)
        if attempt.process is None and not (attempt.has_ended or attempt.stop_wanted):
            self._start()
        elif attempt.is_held:
            attempt.resume()

    def _hold(self) -> None:
        """The lease has ended: stop the program until there is another."""
        if self._attempt is not None and self._attempt.process is not None:
            self._attempt.hold()

    def _leave(self, attempt: int) -> None:
        """Answer once no process of an earlier attempt is left."""
        self._fence = max(self._fence, attempt)
        running = self._attempt
        if running is None or running.process is None or running.number >= attempt:
            self._attempt = running if running and running.number >= attempt else None
            self._send(AttemptsLeft(attempt))
            return
        running.is_fenced = True
        self._end_program(FENCE_GRACE_S)

    def _stop(self, *, leaves: bool) -> None:
        """Ask the program to end: through its attachment if it has one, else by SIGTERM."""
        attempt = self._attempt
        if attempt is None:
            return
        if attempt.stop_wanted:  # to end the job is more than to leave its attempt
            attempt.leaves = attempt.leaves and leaves
            return
        attempt.stop_wanted, attempt.leaves = True, leaves
        grace_s = self._spec.program.grace_s
        if attempt.has_ended:
            return  # that was reported
        if attempt.process is None:
            attempt.has_ended = True
            attempt.report_end(ProcessEnd(exit_code=0))
        elif self._attached is not None:
            attempt.ask_to_stop()
            self._timers["end"] = (
                time.monotonic() + grace_s,
                lambda: self._end_program(grace_s),
            )
        else:
            self._end_program(grace_s)

    def _end_program(self, grace_s: float) -> None:
        process = self._attempt.process if self._attempt is not None else None
        if process is None:
            return
        if self._line.is_script:  # its data loaders are needed until it has saved
            process.signal(signal.SIGTERM)
        else:  # a shell passes no signal on
            self._ask_all(process)
        process.signal_all(signal.SIGCONT)  # one that is stopped shall end too
        self._timers["end"] = (
            time.monotonic() + grace_s,
            lambda: process.signal_all(signal.SIGKILL),
        )

    def _ask_all(self, process: ProgramProcess) -> None:
        self._all_asked = True
        process.signal_all(signal.SIGTERM)

    def _inject_waiting(self) -> None:
        """Inject the faults that came with the order, once there is a program."""
        for order in self._faults_waiting:
            self._inject(order)

    def _inject(self, order: ArmFault) -> None:
        """Send the fault's signal to the program; others are refused when they are requested."""
        process = self._attempt.process if self._attempt is not None else None
        number = Injection.of(order.fault).kind.spec.signal
        if process is None and order not in self._faults_waiting:
            self._faults_waiting.append(order)
        if order.number in self._injected or process is None or number is None:
            return
        self._injected.add(order.number)
        self._send(FaultFired(order.number))
        process.signal(number)

    # --- the program ----------------------------------------------------------------------------

    def _read_output(self) -> None:
        attempt = self._attempt
        if attempt is None or attempt.process is None:
            self._relay.flush()
            return
        if not self._relay.pump(attempt.process.output):
            self._ended_outputs.add(attempt.process.output)
            self._selector.unregister(attempt.process.output)

    def _take_output(self, piece: bytes) -> None:
        if self._attempt is not None:
            self._read_first_steps(self._attempt)
            self._attempt.take_output(piece)

    def _look(self) -> None:
        attempt = self._attempt
        if attempt is None or attempt.process is None:
            return
        self._read_first_steps(attempt)
        if attempt.look():
            self._end_program(self._spec.program.grace_s)
        self._timers["look"] = (time.monotonic() + LOOK_S, self._look)

    def _handle_exit(self) -> None:
        """The program has ended. If it was asked to, what it has started has the same time: a shell
        ends at once, and the training that it started saves."""
        process = self._attempt.process if self._attempt is not None else None
        assert process is not None
        self._selector.unregister(process.pidfd)
        if "end" in self._timers and not self._all_asked:
            self._ask_all(process)
        self._await_rest()

    def _await_rest(self) -> None:
        process = self._attempt.process if self._attempt is not None else None
        assert process is not None
        if "end" in self._timers and process.has_left_others():
            self._timers["rest"] = (time.monotonic() + REST_POLL_S, self._await_rest)
        else:
            self._reap()

    def _reap(self) -> None:
        attempt = self._attempt
        assert attempt is not None
        process = attempt.process
        assert process is not None
        if process.output in self._selector.get_map():
            self._selector.unregister(process.output)
        while self._has_message():
            self._read_program()  # its last messages
        end = attempt.reap(self._relay)
        self._drop_attached()
        self._close_store()
        for name in ("look", "end", "rest", "lease"):
            self._timers.pop(name, None)
        if attempt.is_fenced:
            self._attempt = None
            self._beacon.end()
            self._send(AttemptsLeft(self._fence))
            return
        self._relay.drain(LAST_OUTPUT_S)
        if not attempt.report_end(end):
            self._end_like(end)

    def _end_like(self, end: ProcessEnd) -> None:
        """End as the program did: the agent knows the causes of a process's end."""
        self._link.finish(LAST_WAIT_S)
        self._relay.drain(AGENT_READS_S)
        if end.signal is not None:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the program has left its own
            if end.signal not in _FINAL:
                signal.signal(end.signal, signal.SIG_DFL)
            os.kill(os.getpid(), end.signal)
        os._exit(end.exit_code if end.exit_code else 1)

    # --- the store ------------------------------------------------------------------------------

    def _watch_store(self, order: JoinOrder) -> None:
        """The rank that reports steps knows whether the ranks have met. Raises StoreEnded."""
        self._close_store()
        if order.rank == 0:
            self._store = launcher_links.connect(order.form.store_host, order.form.store_port)
            self._watch(self._store, self._read_store)
            self._timers["store"] = (time.monotonic() + launcher_links.MEETING_S, self._close_store)

    def _read_store(self) -> None:
        assert self._store is not None
        if not launcher_links.has_ended(self._store):
            return
        self._close_store()
        if self._attempt is not None:
            self._attempt.handle_store_end()

    def _close_store(self) -> None:
        self._timers.pop("store", None)
        if self._store is not None:
            self._selector.unregister(self._store)
            self._store.close()
            self._store = None

    # --- the attachment -------------------------------------------------------------------------

    def _accept(self) -> None:
        link, _ = self._listener.accept()
        raw = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, uid, _ = _CREDENTIALS.unpack(raw)
        attempt = self._attempt
        ours = uid == os.getuid() and pid in linux_processes.descendants(os.getpid())
        if self._attached is not None or attempt is None or not ours:
            link.close()  # of a helper of the program, such as a data loader, or of a stranger
            return
        link.setblocking(True)
        self._attached = link
        attempt.attach(link)
        self._watch(link, self._read_program)

    def _read_first_steps(self, attempt: ProgramAttempt) -> None:
        """Take the messages that wait, up to the first step: the program may have sent them before
        it printed or wrote what is read now, and that shows no step then."""
        while not attempt.reports_steps and self._has_message():
            self._read_program()

    def _has_message(self) -> bool:
        return self._attached is not None and readiness.is_readable(self._attached)

    def _read_program(self) -> None:
        """Take the next message, if it has not been taken yet."""
        if not self._has_message():
            return
        assert self._attached is not None
        try:
            message: ProgramMessage = control_channel.receive(self._attached, *PROGRAM_MESSAGES)
        except WorkersError:
            self._drop_attached()
            return
        if self._attempt is not None:
            self._attempt.take(message)

    def _drop_attached(self) -> None:
        if self._attached is None:
            return
        self._selector.unregister(self._attached)
        self._attached.close()
        self._attached = None
        if self._attempt is not None:
            self._attempt.detach()

    # --- internals ------------------------------------------------------------------------------

    def _private_descriptors(self) -> list[int]:
        """The descriptors that a program must not hold."""
        sockets = [self._end, self._listener, *([self._store] if self._store is not None else [])]
        own = (self._sending_end, self._relay.target, self._selector.fileno())
        return [*(each.fileno() for each in sockets), *own]

    def _watch(self, readable: int | socket.socket, call: Callable[[], None]) -> None:
        self._selector.register(readable, selectors.EVENT_READ, call)

    def _pause_s(self) -> float | None:
        due = min((due for due, _ in self._timers.values()), default=inf)
        return None if due == inf else max(0.0, due - time.monotonic())

    def _send(self, message: WorkerMessage) -> None:
        self._link.send(message)


_FINAL = (signal.SIGKILL, signal.SIGSTOP)


def line_of(spec: TrainingSpec) -> ProgramLine:
    """The command line of a rank of this job."""
    if spec.command is not None:
        return ProgramLine(spec.command, is_script=False, fork=False)
    ray_train = ("-m", "holdfast.integrations.ray_train", str(spec.ray_train))
    return ProgramLine(spec.script or ray_train, is_script=True, fork=spec.program.fork)


def _listen(name: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(f"\0{name}")
    listener.listen(8)
    return listener
