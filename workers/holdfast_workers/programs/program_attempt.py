"""One attempt of one rank's program: its start, its signs of life, its steps, its end.

What an attempt reports to the agent is decided here; `launcher.py` calls it as things happen.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from holdfast_workers.errors import WorkersError
from holdfast_workers.ipc import control_channel, linux_processes
from holdfast_workers.ipc.linux_processes import ProcessEnd
from holdfast_workers.ipc.output_lines import OutputLine
from holdfast_workers.ipc.visible_devices import VisibleDevices
from holdfast_workers.program_metrics.metric_names import OwnMetrics
from holdfast_workers.program_metrics.step_sources import StepSources
from holdfast_workers.programs import error_file, full_disk
from holdfast_workers.programs.last_threads import LastThreads
from holdfast_workers.programs.launcher_links import StoreEnded
from holdfast_workers.programs.output_relay import OutputRelay
from holdfast_workers.programs.program_output import OutputTail, ShownSteps, Silence
from holdfast_workers.programs.program_process import ProgramLine, ProgramProcess
from holdfast_workers.programs.torchrun_variables import (
    ProgramLinks,
    ordered_devices,
    program_variables,
    with_variables,
)
from holdfast_workers.protocol.messages import (
    BUSY_PHASE,
    HOLD_PHASE,
    PROGRAM_PHASE,
    ErrorKind,
    ErrorReport,
    JoinOrder,
    StepRow,
    Tier,
)
from holdfast_workers.protocol.processes import (
    CommittedToMemory,
    PartnerPresence,
    ProgramStarted,
    SignalOfWorker,
    StateReply,
    StepReplicated,
    StepReport,
    WorkerMessage,
    WorkerSignal,
    ZygoteConfig,
)
from holdfast_workers.protocol.programs import (
    Attached,
    ProgramMessage,
    ProgramPlace,
    ProgramSaved,
    ProgramStep,
    StateTaken,
    StopWanted,
)
from holdfast_workers.protocol.signals import (
    ProgramAttached,
    WorkerDone,
    WorkerFailed,
    WorkerJoined,
    WorkerLeft,
)
from holdfast_workers.spec import TrainingSpec
from holdfast_workers.training import rank_log

if TYPE_CHECKING:
    from holdfast_workers.progress.beacon import Beacon


class ProgramAttempt:
    """`send` sends a message to the agent."""

    def __init__(
        self,
        order: JoinOrder,
        config: ZygoteConfig,
        spec: TrainingSpec,
        line: ProgramLine,
        beacon: Beacon,
        socket_name: str,
        node_devices: tuple[str, ...],
        send: Callable[[WorkerMessage], None],
    ) -> None:
        self.order = order
        self.process: ProgramProcess | None = None
        """The program's process; None before its start and after its end."""
        self.has_ended = False
        self.is_held = False
        self.is_fenced = False
        self.stop_wanted = False
        self.leaves = False
        """Whether the ranks are asked to leave the attempt, so that the mesh can change."""
        self._config = config
        self._spec = spec
        self._line = line
        self._beacon = beacon
        self._node_devices = node_devices
        self._send = send
        # In the folder of the beacons, which is there: that of the segments may be made later.
        self._error_path = beacon.path.with_name(f"error-{order.rank}-{order.attempt}.json")
        self._code_path = self._error_path.with_suffix(".code")
        self._links = ProgramLinks(socket_name, str(self._error_path))
        self._output = OutputTail()
        self._silence = Silence()
        self._threads = LastThreads()
        self._ends_threads = False
        """Whether its process is ended, as only threads keep it."""
        self._main_pid = 0  # in a forked script
        self._sources = StepSources(spec.program, time.time(), only_lines=order.rank != 0)
        self._shown = ShownSteps()
        self._own = OwnMetrics()
        self._level = 0
        """The highest level at which the program has attached, see `ProgramAttached`."""
        self._integration = ""
        self._protected = -1  # the newest step that the partners of every rank hold
        self._program: socket.socket | None = None
        self._program_shows_phases = False
        self.reports_steps = False
        """Whether the program has reported a step itself; its lines and event files show none then.
        One that attaches for its memory checkpoints may report none."""
        self._memory: dict[type, StateReply | StepReplicated | PartnerPresence] = {}
        self._step = order.seat.restore.step
        self._has_stepped = False
        self._held_at: float | None = None
        self._held_s = 0.0
        """How long the program stood still, without a lease, since its last step."""
        self._began = time.monotonic()
        beacon.begin(order.attempt)
        beacon.enter("launch", 0)

    @property
    def number(self) -> int:
        return self.order.attempt

    # --- start and end --------------------------------------------------------------------------

    def start(self, private: Sequence[int]) -> ProgramProcess:
        """Start the program, and report that the rank has joined. Raises OSError."""
        self._clear_files()
        self.is_held = False
        process = ProgramProcess(
            self._line, self._variables(), private, self._in_fork, self._record_end
        )
        self.process = process
        self._silence.looked_at = time.monotonic()
        self._silence.show(time.monotonic())
        self._enter_program()
        self._send(ProgramStarted(self.number, process.pid))
        restore = self.order.seat.restore
        phases = {"launch": time.monotonic() - self._began}
        self._signal(WorkerJoined(restore.step, restore.tier, phases))
        rank_log.log_program_start(
            self.number, self.order.rank, self.order.form.world_size, self._line.arguments
        )
        return process

    def hold(self) -> None:
        """Stop the program until `resume`; before its start, only note it."""
        self.is_held = True
        if self.process is not None:
            self.process.signal_all(signal.SIGSTOP)
            self._held_at = self._held_at or time.monotonic()
        if not self._program_shows_phases:
            self._beacon.enter(HOLD_PHASE, self._step, bound_s=math.inf)

    def resume(self) -> None:
        self.is_held = False
        now = time.monotonic()
        self._silence.show(now)
        if self._held_at is not None:
            self._held_s, self._held_at = self._held_s + now - self._held_at, None
        if not self._program_shows_phases:
            self._enter_program()
        if self.process is not None:
            self.process.signal_all(signal.SIGCONT)

    def reap(self, relay: OutputRelay) -> ProcessEnd:
        """The program has ended: collect its exit status, and relay the rest of its output."""
        process = self.process
        assert process is not None
        end = process.reap()
        relay.finish(process.output)
        self.take_output(b"\n")  # the last line may have no end
        self._read_files(final=True)
        process.close()
        self._threads.forget()
        self.process, self.has_ended = None, True
        return end

    def report_end(self, end: ProcessEnd) -> bool:
        """Report the end of the program, unless the launcher is to end as it did: False."""
        self._beacon.enter("ended", self._step, bound_s=math.inf)
        if self.stop_wanted and end.exit_code != 0:
            rank_log.log_program_stop(self.number, str(end))
        recorded = error_file.read(self._error_path)
        if self._ends_threads:
            end = self._end_of_script() or end
            if end.exit_code is None:
                recorded = recorded or error_file.of_threads(self._output.text())
        self._clear_files()
        if end.exit_code == 0 or self.stop_wanted:
            self._signal(WorkerLeft(self._step) if self.leaves else WorkerDone(self._step))
            return True
        if recorded is None and not end.exit_code:
            return False  # by a signal
        self._report(recorded or error_file.of_output(str(end), self._output.text()), end)
        return True

    def _end_of_script(self) -> ProcessEnd | None:
        """The end that a forked script has told before its threads were waited for."""
        try:
            return ProcessEnd(exit_code=int(self._code_path.read_text()))
        except (OSError, ValueError):
            return None

    def _clear_files(self) -> None:
        for path in (self._error_path, self._code_path):
            path.unlink(missing_ok=True)

    def report_failure(self, error: WorkersError, kind: ErrorKind = ErrorKind.INTERNAL) -> None:
        """Report that the program could not be started, or must be started again."""
        self.has_ended = self.process is None
        report = ErrorReport(kind, type(error).__name__, str(error), "", self._place)
        self._signal(WorkerFailed(report))

    def handle_store_end(self) -> None:
        """The rendezvous store has ended. Ranks that step have met and do not need it."""
        if self._has_stepped or self.has_ended or self.stop_wanted or self.is_fenced:
            return
        where = f"{self.order.form.store_host}:{self.order.form.store_port}"
        error = StoreEnded(f"the rendezvous store on {where} ended before the first step")
        self.report_failure(error, ErrorKind.COMMUNICATION)

    def _report(self, recorded: error_file.RecordedError, end: ProcessEnd) -> None:
        places = full_disk.places_of(self._line.arguments)
        report = ErrorReport(
            kind=error_file.kind_of(recorded),
            type=recorded.type or str(end).replace(" ", "_"),
            message=control_channel.shorten_middle(recorded.message) + full_disk.describe(places),
            traceback=error_file.shorten(recorded.traceback),
            step=self._place,
        )
        self._signal(WorkerFailed(report))

    @property
    def _place(self) -> int:
        """The step at which this rank is, as it has shown itself."""
        return self._shown.place(reports=self.order.rank == 0)

    # --- signs of life --------------------------------------------------------------------------

    def take_output(self, piece: bytes) -> None:
        """Read the metrics in a piece of the program's output, and keep its last lines."""
        for line in self._output.feed(piece):
            self._read_metrics(line)

    def _read_metrics(self, line: OutputLine) -> None:
        """A step that a line shows, unless the program reports its steps itself."""
        if self.reports_steps or (step := self._sources.read_line(line, time.time())) is None:
            return
        if self.order.rank == 0:
            self._take_step(step)
        self._shown.add(step.step)

    def _read_files(self, *, final: bool = False) -> None:
        if self.reports_steps:
            return
        for step in self._sources.poll(time.time(), final=final):
            self._take_step(step)

    def look(self) -> bool:
        """Show in the beacon whether a program without steps is at work; read its event files. True
        once, if the program has ended and only threads without a sign of life keep its process."""
        process = self.process
        if process is None or self.is_held or self._ends_threads:
            return False
        process.reap_orphans()
        self._read_files()
        now = time.monotonic()
        if self._silence.has_sign_of_life(self._output.bytes, process.processor_s(), now):
            self._threads.forget()
            if not self._program_shows_phases:
                self._enter_program()
        self._ends_threads = self._only_threads_remain(process, now - self._silence.alive_at)
        return self._ends_threads

    def _only_threads_remain(self, process: ProgramProcess, silent_s: float) -> bool:
        """Looked at before the rank would count as one that hangs."""
        limit_s = self._spec.program.silence_s
        shown_s = self._spec.program.step_limit_s if self._program_shows_phases else limit_s
        if self._threads.look(process.pid, silent_s, min(limit_s, shown_s)):
            self._program_shows_phases = False
            self._beacon.take_over()
            self._beacon.enter("threads", self._step, bound_s=math.inf)
        if not self._threads.found or silent_s < limit_s:
            return False
        rank_log.log_remaining_threads(self.number, self._threads.found, limit_s)
        return True

    def _enter_program(self) -> None:
        limit_s = self._spec.program.silence_s
        is_seen = time.monotonic() - self._silence.shown_at <= limit_s
        phase = PROGRAM_PHASE if is_seen else BUSY_PHASE
        self._beacon.enter(phase, self._step, bound_s=limit_s)

    # --- the attachment -------------------------------------------------------------------------

    def attach(self, link: socket.socket) -> None:
        """The program has attached: give it its place."""
        self._program = link
        order = self.order
        self._send_to_program(
            ProgramPlace(
                job_id=self._config.plan.job_id,
                attempt=self.number,
                rank=order.rank,
                world_size=order.form.world_size,
                beacon=str(self._beacon.path),
                segment_path=order.segment_path,
                restore=order.seat.restore,
                has_partner=bool(order.seat.partners),
                stop_wanted=self.stop_wanted,
                start_bound_s=self._spec.program.silence_s,
                step_bound_s=self._spec.program.step_limit_s,
            )
        )
        for message in self._memory.values():
            self._send_to_program(message)

    def detach(self) -> None:
        """The program's side has closed: it is about to end, or runs on without steps."""
        self._program, self._program_shows_phases = None, False
        self._beacon.take_over()
        if self.process is not None:
            self._enter_program()

    def ask_to_stop(self) -> None:
        self._send_to_program(StopWanted())

    def pass_on(self, message: StateReply | StepReplicated | PartnerPresence) -> None:
        """Pass the agent's message on, and keep the newest of each kind: it may arrive before the
        program attaches."""
        if isinstance(message, PartnerPresence):  # what former partners held no longer counts
            self._memory.pop(StepReplicated, None)
        self._memory[type(message)] = message
        self._send_to_program(message)

    def take(self, message: ProgramMessage) -> None:
        """Take a message of the program."""
        match message:
            case ProgramStep():
                self._program_shows_phases = self.reports_steps = True
                self._take_step(message)
            case ProgramSaved(step=step, protected=protected):
                self._protected = max(self._protected, protected)
                self._send(CommittedToMemory(self.number, step, protected))
                self._reach(2)
            case Attached(integration=integration):
                self._integration = integration
                self._reach(1)
            case StateTaken(step=step):
                restore = self.order.seat.restore
                if restore.tier is not Tier.RESHARD:  # new partners may lack it
                    self._send(CommittedToMemory(restore.attempt, step))

    def _reach(self, level: int) -> None:
        """Report a level of the program that is higher than before."""
        if level > self._level:
            self._level = level
            self._signal(ProgramAttached(level, self._integration))

    def _take_step(self, step: ProgramStep) -> None:
        self._step = max(self._step, step.step)
        self._shown.add(step.step)
        self._has_stepped = True
        self._silence.show(time.monotonic())
        trained_s, self._held_s = max(0.0, step.step_time_s - self._held_s), 0.0
        if self.order.rank != 0:
            return
        row = StepRow(
            attempt=self.number,
            step=step.step,
            at=step.at,
            loss=_number(step.loss),
            grad_norm=_number(step.grad_norm),
            lr=_number(step.lr),
            tokens=step.tokens,
            step_time_s=trained_s,
            samples="",
            protected_step=self._protected,
            own=self._own.storable(step.own),
        )
        self._send(StepReport(self.order.rank, row))

    def _send_to_program(self, message: object) -> None:
        if self._program is not None:
            with contextlib.suppress(control_channel.ControlClosed, BlockingIOError):
                control_channel.send(self._program, message, wait=False)

    # --- in the new process ---------------------------------------------------------------------

    def _variables(self) -> dict[str, str]:
        variables = program_variables(self.order, self._config.plan.job_id, self._links)
        variables.update(self._device_variables())
        threads = str(self._config.plan.resources.threads_per_worker)
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
            variables[name] = threads
        variables["HOLDFAST_TRAIN_CONFIG"] = json.dumps(self._spec.config)
        variables["HOLDFAST_MEMORY_STEPS"] = str(self._spec.checkpoint.memory.every_steps)
        variables["HOLDFAST_TRAIN_RUN"] = self._spec.ray_run.model_dump_json()
        variables["PYTHONUNBUFFERED"] = "1"
        return with_variables(os.environ, variables)

    def _device_variables(self) -> dict[str, str]:
        own = VisibleDevices.of(os.environ)
        if not own.names:
            return {}
        local_rank = self.order.local_rank
        return own.environment_of(ordered_devices(own.names, self._node_devices, local_rank))

    def _in_fork(self) -> None:
        """Prepare a forked script, before its first line."""
        import torch

        from holdfast_workers.progress import collective_counts
        from holdfast_workers.progress.beacon import Beacon

        linux_processes.name_process(f"rank-{self.order.rank}")
        self._main_pid = os.getpid()
        torch.set_num_threads(self._config.plan.resources.threads_per_worker)
        beacon = Beacon(self._beacon.path)
        beacon.begin(self.number)
        beacon.make_current()
        collective_counts.install(beacon)

    def _record_end(self, end: Exception | int) -> None:
        with contextlib.suppress(Exception):  # one that cannot be described: its output is read
            if isinstance(end, Exception):
                error_file.write(self._error_path, end)
            elif os.getpid() == self._main_pid:  # no fork of the script
                self._code_path.write_text(str(end))

    def _signal(self, detail: SignalOfWorker) -> None:
        self._send(WorkerSignal(self.number, self.order.rank, detail))


def _number(value: float | None) -> float:
    return math.nan if value is None else value
