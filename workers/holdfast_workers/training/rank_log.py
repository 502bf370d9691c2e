"""The lines that each rank prints to its log: where it resumes, its steps, and why it stops.

The log of a job always contains what a trainer usually prints, even if the training program
prints nothing. The lines go to standard output; a closed output is never an error.
"""

from __future__ import annotations

import contextlib
import shlex
import time
from collections.abc import Mapping, Sequence
from math import isfinite

from holdfast_workers.errors import short_error
from holdfast_workers.protocol.findings import EarlyStop
from holdfast_workers.protocol.messages import ErrorKind, StepRow, Tier
from holdfast_workers.training.evaluation import LOSS

STEP_LINE_INTERVAL_S = 10.0
"""Least time between two step lines; the first step of an attempt and the job's last step are
always printed."""

_MAX_MESSAGE_CHARS = 300
_NAMED_BUFFERS = 20
_SOURCES = {
    Tier.OWN_RAM: "from its own memory",
    Tier.PARTNER_RAM: "from a partner's memory",
    Tier.RESHARD: "from memory, resharded from another mesh",
    Tier.REMOTE: "from remote storage",
}


class RankLog:
    """Prints the lines of one rank in one attempt; `steps` is the number of steps of the job."""

    def __init__(self, rank: int, attempt: int, mesh: Mapping[str, int], steps: int) -> None:
        self._rank = rank
        self._attempt = attempt
        self._mesh = mesh
        self._steps = steps
        self._last_line_at: float | None = None

    def log_joined(self, step: int, tier: Tier, phases_s: Mapping[str, float]) -> None:
        """The rank has the state after `step` and starts to train."""
        axes = " x ".join(f"{name} {size}" for name, size in self._mesh.items() if size > 1)
        durations = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in phases_s.items())
        starts = f"resumes after step {step} {_SOURCES[tier]}" if tier in _SOURCES else "starts"
        _info(
            f"attempt {self._attempt}: rank {self._rank} of {axes or 'a single rank'} {starts} "
            f"({durations})"
        )

    def log_step(self, row: StepRow) -> None:
        """`row` was committed. Rank 0 prints it for all ranks, if the interval has passed, if it
        was evaluated, or if it is the last one."""
        now = time.monotonic()
        early = self._last_line_at is not None and now - self._last_line_at < STEP_LINE_INTERVAL_S
        shown = row.step == self._steps or LOSS in row.own
        if self._rank != 0 or (early and not shown):
            return
        self._last_line_at = now
        _info(format_step(row))

    def log_done(self, step: int, early: EarlyStop | None) -> None:
        why = "" if early is None else f", early: {early.reason}"
        _info(f"attempt {self._attempt}: finished after step {step}{why}")

    def log_left(self, step: int) -> None:
        _info(f"attempt {self._attempt}: left after step {step}, because the mesh changes")

    def log_fenced(self, step: int) -> None:
        _info(f"attempt {self._attempt}: ended after step {step}; waiting for the next attempt")

    def log_failed(self, step: int, kind: str, type_name: str, message: str, trace: str) -> None:
        """`kind` is an ErrorKind. An exception of the program itself is printed with its trace."""
        where = f"attempt {self._attempt}: failed after step {step}"
        if kind == ErrorKind.COMMUNICATION:
            reason = short_error(message)[:_MAX_MESSAGE_CHARS]
            _print("WARNING", f"{where}: lost the connection to a peer ({reason})")
            return
        first_line = message.partition("\n")[0][:_MAX_MESSAGE_CHARS]
        suffix = f"\n{trace.rstrip()}" if kind in (ErrorKind.USER, ErrorKind.INTERNAL) else ""
        _print("ERROR", f"{where}: {type_name}: {first_line}{suffix}")


def log_lease_wait(attempt: int, waited_s: float) -> None:
    _print(
        "WARNING",
        f"attempt {attempt}: paused for {waited_s:.1f} s because no supervisor renewed the lease",
    )


def log_not_finite(step: int, names: Sequence[str]) -> None:
    """An evaluation has results that no series can have."""
    _print("WARNING", f"the evaluation of step {step}: {', '.join(names)} not finite")


def log_unsaved_buffers(names: Sequence[str]) -> None:
    """Buffers that the function registered with a module, but not as a part of its state."""
    shown = ", ".join(names[:_NAMED_BUFFERS]) + (", ..." if len(names) > _NAMED_BUFFERS else "")
    _print(
        "WARNING",
        f"not saved, because they are not persistent: the buffers {shown}. A recovery has them as "
        "the function builds them: if training changes them, register them with persistent=True",
    )


def log_differing_objects(names: Sequence[str]) -> None:
    """Objects of a function have other values on some ranks."""
    _print(
        "WARNING",
        f"{', '.join(names)}: not the same on all ranks. Each rank gets its own back on this mesh; "
        "after a change of the mesh, all ranks get those of rank 0",
    )


def log_lost_state(lost: str) -> None:
    """An object has not taken all of the state that was loaded into it."""
    _print("WARNING", lost)


def log_program_start(attempt: int, rank: int, ranks: int, words: Sequence[str]) -> None:
    _info(f"attempt {attempt}: rank {rank} of {ranks} starts {shlex.join(words)}")


def log_program_stop(attempt: int, end: str) -> None:
    """The program was asked to end, and did not end as one that has finished."""
    _print("WARNING", f"attempt {attempt}: the program was asked to end, and ended by {end}")


def log_remaining_threads(attempt: int, threads: str, silent_s: float) -> None:
    """The main program has ended, and threads keep its process."""
    _print(
        "WARNING",
        f"attempt {attempt}: the main program has ended, but threads remain, some of which may be "
        f"daemon threads: {threads}. They neither printed nor computed for {silent_s:g} s: the "
        "process is ended now. Join such threads, or make them daemon threads",
    )


def format_step(row: StepRow) -> str:
    """A step as one line; unknown values are left out."""
    figures = {
        "loss": f"{row.loss:.4f}" if isfinite(row.loss) else None,
        "grad norm": f"{row.grad_norm:.3f}" if isfinite(row.grad_norm) else None,
        "lr": f"{row.lr:.2e}",
        **{name: f"{value:.4g}" for name, value in row.own.items()},
    }
    known = [f"{name} {figure}" for name, figure in figures.items() if figure is not None]
    speed = [f"{row.step_time_s * 1e3:.0f} ms"]
    if row.tokens:
        speed.append(f"{row.tokens / row.step_time_s:,.0f} tokens/s")
    return "  ".join([f"step {row.step:>6}", *known, *speed])


def _info(text: str) -> None:
    _print("INFO", text)


def _print(level: str, text: str) -> None:
    # The reader of the pipe is gone and will end this process; or the program closed its output.
    with contextlib.suppress(OSError, ValueError):
        print(f"{level:<7} {text}", flush=True)
