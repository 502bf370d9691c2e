"""What follows from a tripped guard: the ledger grows, and history may be taken back.

The ranks have decided, all alike (`holdfast_workers.training.guards`); here it is made known to
every later attempt. A trip counts as long as no later attempt was formed: that one was told of the
ledger as it was known then, and may have read what this one passed over.
"""

from __future__ import annotations

from typing import Any

from holdfast_service.job_model.supervisor_protocol import EventKind
from holdfast_service.recovery.core_state.state import State
from holdfast_service.recovery.upkeep import remote_cleanup_orders
from holdfast_workers.protocol.messages import Signal
from holdfast_workers.training.skipped_windows import Ledger


def tripped(state: State, signal: Signal, now: float) -> None:
    """Training goes on; every agent with ranks tells it."""
    del now
    heed(state, signal.attempt, signal.detail)


def heed(state: State, attempt: int, report: dict[str, Any]) -> None:
    """A trip, as all ranks of `attempt` report it; once."""
    newest = state.newest_branch()
    trip = (attempt, int(report["step"]), int(report["window"]), str(report["kind"]))
    if newest is None or attempt != newest.attempt or trip in state.trips:
        return
    state.trips.add(trip)
    if report["skipped"] is not None:
        state.ledger |= Ledger.of([report["skipped"]])
    if report["back_to"] is not None:
        take_back(state, attempt, int(report["back_to"]), str(report["kind"]))
    ledger = [list(one) for one in state.ledger.ranges]
    state.emit(EventKind.GUARD_TRIPPED, attempt=attempt, **report, ledger=ledger)


def take_back(state: State, attempt: int, step: int, why: str) -> None:
    """No state of this or an earlier attempt after `step` is used again, by a resumed job either:
    what the remote tier holds of them goes into quarantine."""
    state.line = state.line.taken_back(attempt, step)
    state.saves.keep_only(state.line)
    for one in sorted(state.saves.remotes.values(), key=lambda one: one.step):
        if one.attempt > attempt or one.step <= step or one.uri in state.saves.bad_uris:
            continue
        state.saves.bad_uris.add(one.uri)
        message = f"taken back to step {step}: {why}"
        state.emit(EventKind.CHECKPOINT_BAD, step=one.step, uri=one.uri, message=message)
        remote_cleanup_orders.begin(state, one.step)
