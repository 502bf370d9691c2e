"""A storm: faults of random kinds on random ranks, at exponential intervals, the same for a seed.

It is the client that keeps it up, one ordinary request after the other: whoever started it can end
it, and it never goes on after them.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from holdfast.client.client import Client
from holdfast.errors import Conflict
from holdfast_service.views.jobs import FaultView
from holdfast_workers.fault_injection.kinds import FaultKind, Injection, Victim

LONGEST_LOOK_S = 1.0


@dataclass(frozen=True)
class Strike:
    """One fault of a storm, `at_s` after its beginning."""

    at_s: float
    fault: Injection


def strikes(
    mtbf_s: float, seed: int, kinds: Sequence[FaultKind], world_size: int
) -> Iterator[Strike]:
    """Without end; `mtbf_s` is the mean time between two."""
    drawn = random.Random(seed)
    at_s = 0.0
    while True:
        at_s += drawn.expovariate(1.0 / mtbf_s)
        kind, rank = drawn.choice(kinds), drawn.randrange(world_size)
        whose = rank if Injection(kind).victim in (Victim.RANK, Victim.NODE) else None
        yield Strike(at_s, Injection(kind, rank=whose))


def blow(
    client: Client,
    job_id: str,
    coming: Iterator[Strike],
    for_s: float,
    report: Callable[[FaultView], None],
) -> int:
    """Inject each when it is due, until `for_s` are over or the job is; how many there were."""
    began = time.monotonic()
    count = 0
    for strike in coming:
        if strike.at_s > for_s:
            _wait_for_end(client, job_id, began + for_s)
            break
        if _wait_for_end(client, job_id, began + strike.at_s):
            break
        how = strike.fault.document()
        try:
            report(client.inject(job_id, how.pop("kind"), **how))
        except Conflict:  # it ended meanwhile
            break
        count += 1
    return count


def _wait_for_end(client: Client, job_id: str, until: float) -> bool:
    """Wait; True as soon as the job has ended."""
    while (left := until - time.monotonic()) > 0:
        if client.get(job_id).state.terminal:
            return True
        time.sleep(min(left, LONGEST_LOOK_S))
    return False
