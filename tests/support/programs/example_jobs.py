"""Jobs that run the scripts of `examples/bring` unchanged, under a real supervisor on local agents,
each rank on a node of its own."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.nodes.supervised import SupervisedRun
from tests.support.programs import environments

from holdfast_workers.spec import ParallelSpec, ProgramSpec, TrainingSpec

EXAMPLES = environments.ROOT / "examples" / "bring"
LOSS = re.compile(r"step (\d+) loss ([-+.e0-9]+)")


@contextmanager
def example_job(
    folder: Path,
    script: str,
    *arguments: str,
    pins: tuple[str, ...] = (),
    preload: Sequence[str] = (),
    program: dict[str, Any] | None = None,
    changes: Mapping[str, str] | None = None,
    **options: Any,
) -> Iterator[SupervisedRun]:
    """A job of two ranks. `pins`: its own packages. `program`: fields of its section.
    `changes`: text of the script -> what stands there instead."""
    code = folder / "code"
    code.mkdir(parents=True)
    text = (EXAMPLES / script).read_text()
    for old, new in (changes or {}).items():
        assert old in text
        text = text.replace(old, new)
    (code / script).write_text(text)
    environments.write_entry_points(code)
    if pins:
        environments.modules_of(pins)
        environments.share_with(folder / "job" / "cache")
    training = TrainingSpec(
        script=(script, *arguments),
        parallel=ParallelSpec(dp_shard=2),
        program=ProgramSpec(preload=tuple(preload), **(program or {})),
    )
    options = {"standbys": 0, "workers_per_node": 1, **options}
    run = SupervisedRun(
        folder,
        training,
        code=str(code),
        packages=pins,
        **options,
    )
    try:
        yield run
    finally:
        run.close()


def printed_losses(run: SupervisedRun) -> dict[int, str]:
    """The loss of each step, as printed by the last computation of it."""
    found = filter(None, map(LOSS.fullmatch, run.logs))
    return {int(match[1]): match[2] for match in found}


def reported_losses(run: SupervisedRun) -> dict[int, float]:
    """The loss of each step, as reported by the last computation of it."""
    return {step: row.loss for step, row in run.rows.items()}
