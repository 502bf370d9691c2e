"""Metrics from the TensorBoard event files that a program writes, read as they grow.

`poll` never waits and never fails: a file that cannot be read, or a damaged one, is left out, and
`problem` says why. It reads a limited number of bytes, so that it may be called in a loop that does
other work; the last call reads what it can in a limited time.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from holdfast_workers.program_metrics.event_records import (
    HEADER,
    LARGEST,
    DamagedRecord,
    Scalar,
    record_bytes,
    scalars,
)
from holdfast_workers.program_metrics.metric_names import OwnMetrics
from holdfast_workers.protocol.programs import ProgramStep

MOST_BYTES = 1 << 20
"""Read by a poll, over all files, but not by the last one."""
LAST_S = 2.0
"""How long the last poll may read: the end of the program is reported after it."""
MOST_FILES = 64
PATTERN = "**/events.out.tfevents.*"
TAGS: dict[str, str] = {
    **dict.fromkeys(
        (
            *("loss", "train/loss", "train_loss", "training/loss", "training_loss", "loss/train"),
            *("train/train_loss", "loss_step", "train_loss_step", "train/loss_step", "train-loss"),
        ),
        "loss",
    ),
    **dict.fromkeys(
        ("grad_norm", "train/grad_norm", "gradient_norm", "train/gradient_norm", "grad-norm"),
        "grad_norm",
    ),
    **dict.fromkeys(
        ("lr", "learning_rate", "train/lr", "train/learning_rate", "learning-rate"), "lr"
    ),
}
"""Tag in small letters -> the metric; any other tag is a metric of the user's own."""
_LR_OF_OPTIMIZER = re.compile(r"lr-\w+")
_NOT_OF_A_NAME = re.compile(r"[^A-Za-z0-9_./-]+")


@dataclass
class _EventFile:
    path: Path
    offset: int = 0
    problem: str = ""


class EventFiles:
    """Reads the event files below one folder, in one attempt."""

    def __init__(self, folder: Path, since: float) -> None:
        """`since`: Unix seconds at which the attempt began; older events are of another."""
        self.problem = ""
        """Why the newest damaged file, or the rest of all, is left out; "" if nothing is."""
        self._folder = folder
        self._since = since
        self._files: dict[Path, _EventFile] = {}
        self._steps: dict[int, dict[str, Scalar]] = {}
        """The scalars of steps that were not returned yet: tag -> the newest."""
        self._own = OwnMetrics()
        self._last_step = -1
        self._last_at: float | None = None

    def poll(self, *, final: bool = False) -> list[ProgramStep]:
        """The steps that became complete since the last call, in order. A step is complete when
        there is a later one, when nothing follows it until the next call, or if `final`. Its time
        is the whole time since the step before that was logged."""
        at_most, for_s = (math.inf, LAST_S) if final else (MOST_BYTES, math.inf)
        found = self._read(at_most, time.monotonic() + for_s)
        complete = final or not found
        for scalar in found:
            if scalar.at >= self._since and scalar.step > self._last_step:
                self._steps.setdefault(scalar.step, {})[scalar.tag] = scalar
        upto = math.inf if complete else max(self._steps, default=0)
        ready = sorted(step for step in self._steps if step < upto)
        return [self._row(step, self._steps.pop(step)) for step in ready]

    def _row(self, step: int, by_tag: dict[str, Scalar]) -> ProgramStep:
        at = max(scalar.at for scalar in by_tag.values())
        elapsed_s = 0.0 if self._last_at is None else max(0.0, at - self._last_at)
        self._last_step, self._last_at = step, at
        named: dict[str, float] = {}
        own: dict[str, float] = {}
        for tag, scalar in by_tag.items():
            name = _metric(tag)
            if not math.isfinite(scalar.value):
                continue
            if name is not None:
                named.setdefault(name, scalar.value)
            else:
                own[_NOT_OF_A_NAME.sub("_", tag)] = scalar.value
        return ProgramStep(
            step=step,
            at=at,
            step_time_s=elapsed_s,
            loss=named.get("loss"),
            grad_norm=named.get("grad_norm"),
            lr=named.get("lr"),
            own=self._own.storable(own),
        )

    def _read(self, left: float, until: float) -> list[Scalar]:
        """Read at most about `left` bytes, and not after `until`."""
        found: list[Scalar] = []
        for file in self._present():
            before = file.offset
            try:
                found += _new_scalars(file, left, until)
            except (OSError, DamagedRecord) as error:
                file.problem = f"{file.path} is not read any further: {error}"
                self.problem = file.problem
            left -= file.offset - before
            if left <= 0:
                break
            if time.monotonic() >= until:
                self.problem = (
                    f"steps of the event files in {self._folder} may be missing, from byte "
                    f"{file.offset} of {file.path.name} on: the program has ended, and they could "
                    f"not be read within {LAST_S:g} s"
                )
                break
        return found

    def _present(self) -> Iterable[_EventFile]:
        """The readable files; those that are new are found at each call."""
        try:
            for path in sorted(self._folder.glob(PATTERN)):
                if path in self._files or len(self._files) == MOST_FILES:
                    continue
                if path.stat().st_mtime >= self._since:
                    self._files[path] = _EventFile(path)
        except OSError as error:
            self.problem = f"{self._folder}: {error.strerror}"
        return [file for file in self._files.values() if not file.problem]


def _new_scalars(file: _EventFile, at_most: float, until: float) -> list[Scalar]:
    """Read the whole records after the file's offset, about `at_most` bytes, until then. Raises
    OSError, DamagedRecord."""
    found: list[Scalar] = []
    end = file.offset + at_most
    with file.path.open("rb") as source:
        size = source.seek(0, 2)
        while file.offset + HEADER <= size and file.offset < end and time.monotonic() < until:
            source.seek(file.offset)
            header = source.read(HEADER)
            if len(header) < HEADER:
                break
            length = record_bytes(header)
            if file.offset + length > size:
                break  # it is being written
            if length <= LARGEST:
                found += scalars(header + source.read(length - HEADER))
            file.offset += length
    return found


def _metric(tag: str) -> str | None:
    name = tag.lower()
    return "lr" if _LR_OF_OPTIMIZER.fullmatch(name) else TAGS.get(name)
