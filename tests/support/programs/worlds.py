"""Jobs whose ranks run a script of the test, under a real supervisor on local agents."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.nodes.supervised import SupervisedRun

from holdfast_service.job_model.supervisor_protocol import EventKind
from holdfast_workers.spec import ParallelSpec, ProgramSpec, TrainingSpec


def program_training(
    *, ranks: int = 2, program: ProgramSpec | None = None, **fields: Any
) -> TrainingSpec:
    """`fields`: `script`, `command`, ..."""
    return TrainingSpec(
        parallel=ParallelSpec(dp_shard=ranks), program=program or ProgramSpec(), **fields
    )


@contextmanager
def running_program(
    folder: Path, files: dict[str, str], training: TrainingSpec, **options: Any
) -> Iterator[SupervisedRun]:
    """The job with these files as its code folder; its ranks are on a node each."""
    code = folder / "code"
    code.mkdir(parents=True)
    for name, text in files.items():
        (code / name).write_text(textwrap.dedent(text))
    options = {"standbys": 0, "workers_per_node": 1, **options}
    run = SupervisedRun(folder, training, code=str(code), **options)
    try:
        yield run
    finally:
        run.close()


def attempts(run: SupervisedRun) -> int:
    """The number of attempts that have run."""
    return len(run.of(EventKind.ATTEMPT_RUNNING))


def wait_next_attempt(run: SupervisedRun, before: int, timeout_s: float = 60.0) -> None:
    run.wait(lambda: attempts(run) > before, timeout_s)


def printed(run: SupervisedRun, text: str, timeout_s: float = 60.0) -> str:
    """The first line with this text, once it is there."""
    run.wait(lambda: any(text in line for line in run.logs), timeout_s)
    return next(line for line in run.logs if text in line)
