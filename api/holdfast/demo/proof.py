"""The proof of the elastic demo: every step of a job with resizes, against its replay."""

from __future__ import annotations

from rich.console import Console

from holdfast.client.synchronous.client import Client
from holdfast.demo.compare import RunComparison, compare
from holdfast.demo.run import samples, watch
from holdfast_service.views.jobs import JobView


def prove(client: Client, console: Console, resized: JobView) -> tuple[RunComparison, ...]:
    """Replay the job without faults, on the same meshes at the same steps, and compare every step.

    All state must have the same bits, and each sample must have been read once in spite of the
    resizes. A step before an unplanned resize has no digest if the fault prevented its report.
    Raises HoldfastError.
    """
    replay = watch(client, console, client.replay(resized.id), None)
    found = client.comparison(replay.id)
    first = found.first_difference
    differing = (first.step,) if first is not None else ()
    return (
        RunComparison("digest of all state", found.compared, found.equal, differing, ()),
        compare(
            "samples consumed",
            resized.progress.steps or 0,
            samples(client, replay.id),
            samples(client, resized.id),
        ),
    )
