"""A storm: faults of random kinds on random ranks, at exponential intervals, the same for a seed.

The client runs the storm, with one ordinary request per fault: the storm ends with the process
that started it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from holdfast.client.synchronous.jobs import Client
from holdfast.errors import Conflict, WaitTimeout
from holdfast_service.views.incidents import FaultView
from holdfast_workers.fault_injection.kinds import FaultKind, Injection

MAX_POLL_S = 1.0


@dataclass(frozen=True)
class ScheduledFault:
    """One fault of a storm, `at_s` after its start."""

    at_s: float
    injection: Injection


def schedule(
    mtbf_s: float, seed: int, kinds: Sequence[FaultKind], world_size: int
) -> Iterator[ScheduledFault]:
    """An endless sequence of faults; `mtbf_s` is the mean time between two of them."""
    chance = random.Random(seed)
    at_s = 0.0
    while True:
        at_s += chance.expovariate(1.0 / mtbf_s)
        kind, rank = chance.choice(kinds), chance.randrange(world_size)
        yield ScheduledFault(at_s, Injection(kind, rank=rank if kind.spec.has_rank else None))


def run(
    client: Client,
    job_id: str,
    faults: Iterator[ScheduledFault],
    for_s: float,
    report: Callable[[FaultView], None],
) -> int:
    """Inject each fault when it is due, until `for_s` have passed or the job has ended. Returns the
    number of injected faults."""
    began = time.monotonic()
    count = 0
    for fault in faults:
        if fault.at_s > for_s:
            _wait_for_end(client, job_id, began + for_s)
            break
        if _wait_for_end(client, job_id, began + fault.at_s):
            break
        parameters = fault.injection.document()
        try:
            report(client.inject(job_id, parameters.pop("kind"), **parameters))
        except Conflict:  # the job ended meanwhile
            break
        count += 1
    return count


def _wait_for_end(client: Client, job_id: str, until: float) -> bool:
    """Wait until `until`; True as soon as the job has ended."""
    try:
        client.wait(job_id, until - time.monotonic(), MAX_POLL_S)
    except WaitTimeout:
        return False
    return True
