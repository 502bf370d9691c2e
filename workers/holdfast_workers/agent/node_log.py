"""Logs events and signals of a node's agent, and the output of its ranks, for log collectors.

Only where the node's logs are collected (`AgentConfig.json_logs`); `log_setup` writes the lines.
Each has `job`, `agent` and `node`; a line of output (`event` is `output`) also has `attempt`,
`rank`, `worker` and `message`. They go to the standard error of the agent's process, which Ray
keeps in a file per process.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, NoReturn

import structlog
from structlog.typing import FilteringBoundLogger

from holdfast_workers.protocol.signals import Signal, SignalDetail, SignalKind

_WARNINGS = frozenset(
    {
        *(SignalKind.WORKER_EXITED, SignalKind.WORKER_FAILED, SignalKind.SHARD_FAILED),
        *(SignalKind.SHARD_DELAYED, SignalKind.PARTNER_LOST, SignalKind.ZYGOTE_LOST),
        *(SignalKind.SOURCES_LOST, SignalKind.RANK_STALLED, SignalKind.NODE_UNWELL),
        *(SignalKind.GUARD_TRIPPED, SignalKind.BAD_SHARD),
    }
)


def node_log(collected: bool) -> FilteringBoundLogger:
    """The log of this process's node; unless it is `collected`, nothing is written."""
    processors = None if collected else [_drop]  # None: those of the process
    log: FilteringBoundLogger = structlog.wrap_logger(None, processors)
    return log


def logged(
    log: FilteringBoundLogger, on_signal: Callable[[Signal], None]
) -> Callable[[Signal], None]:
    """`on_signal`, with each signal logged before."""

    def log_and_send(signal: Signal) -> None:
        log_signal(log, signal)
        on_signal(signal)

    return log_and_send


def log_signal(log: FilteringBoundLogger, signal: Signal) -> None:
    """Log a signal that the agent sent to its supervisor."""
    log.log(
        logging.WARNING if signal.kind in _WARNINGS else logging.INFO,
        str(signal.kind),
        attempt=signal.attempt,
        rank=signal.rank,
        worker=signal.worker,
        pid=signal.pid,
        detail=_fields_of(signal.detail),
    )


def _fields_of(detail: SignalDetail) -> dict[str, object]:
    """The fields that are set, without the kind, which the line names as its event."""
    fields = {name: value for name, value in asdict(detail).items() if name != "kind"}
    return {name: value for name, value in fields.items() if value not in ("", None)}


def _drop(_logger: Any, _method: str, _event: Any) -> NoReturn:
    raise structlog.DropEvent
