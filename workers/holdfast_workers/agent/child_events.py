"""The events of a node's children: each goes to the part of the agent that it concerns.

Called by the I/O thread (`ipc/io_loop.py`), and never waits. A zygote or a rendezvous store that
ended is replaced in the background, until zygotes end too early too often: then the node is unfit.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import structlog

from holdfast_workers.agent.background_threads import BackgroundTasks
from holdfast_workers.agent.remote_saves import RemoteSaves
from holdfast_workers.agent.rendezvous import Rendezvous
from holdfast_workers.agent.run_journal import RunJournal
from holdfast_workers.agent.token_fetching import TokenFetching
from holdfast_workers.agent.worker_pool import WorkerPool
from holdfast_workers.fault_injection.orders import FaultOrders
from holdfast_workers.ipc.children import Child, ChildProcesses, ZygoteFailed
from holdfast_workers.ipc.io_loop import NodeIO
from holdfast_workers.ipc.line_budget import TOO_FAST, LeftOut
from holdfast_workers.ipc.linux_processes import ProcessEnd
from holdfast_workers.protocol.processes import (
    FaultFired,
    FetcherJob,
    FrozenCopy,
    StorageRefusal,
    StoreJob,
    StorePort,
    TemplateJob,
    WorkerJob,
    WorkerMessage,
)
from holdfast_workers.protocol.signals import ShardRecord

ZYGOTE_EARLY_S = 30.0
ZYGOTE_LIVES = 3
"""The number of zygotes in a row that may end so early; after it none is started any more."""
CUT_OFF = "WARNING ... lines may be missing here: the launcher of the rank was killed"


class ChildEvents:
    """`on_zygote_lost(error)` is called at each end of a zygote; `error`: none replaces it."""

    def __init__(
        self,
        child_processes: ChildProcesses,
        worker_pool: WorkerPool,
        rendezvous: Rendezvous,
        saves: RemoteSaves,
        fault_orders: FaultOrders,
        journal: RunJournal,
        fetching: TokenFetching,
        background: BackgroundTasks,
        closing: threading.Event,
        log: structlog.typing.FilteringBoundLogger,
        on_zygote_lost: Callable[[ZygoteFailed | None], None],
    ) -> None:
        self.io = NodeIO(self)
        self._child_processes = child_processes
        self._worker_pool = worker_pool
        self._rendezvous = rendezvous
        self._saves = saves
        self._fault_orders = fault_orders
        self._journal = journal
        self._fetching = fetching
        self._background = background
        self._closing = closing
        self._log = log
        self._on_zygote_lost = on_zygote_lost
        self._zygotes_lost_early = 0

    def on_worker_message(self, name: str, message: WorkerMessage) -> None:
        if isinstance(message, FaultFired):
            self._fault_orders.fired(message.number)
        else:
            self._worker_pool.on_message(name, message)

    def on_child_message(self, child: Child, message: object) -> None:
        """Handle a message of a store host or saver."""
        match child.job, message:
            case StoreJob(), StorePort(port=0, problem=problem):
                self._log.error("no_rendezvous_store", why=problem)
                self._rendezvous.record_problem(problem)
            case StoreJob(), StorePort(port=port, attempt=attempt):
                self._rendezvous.record_port(port, attempt)
            case FrozenCopy() as copy, ShardRecord() | StorageRefusal() as outcome:
                self._saves.on_message(copy, outcome)

    def on_child_log(self, child: Child, text: str | LeftOut) -> None:
        attempt, rank = self._worker_pool.attempt_and_rank(child.name)
        gap = text if isinstance(text, LeftOut) else None
        line = gap.mark(rank, TOO_FAST) if gap is not None else str(text)
        self._journal.log(child.name, attempt, rank, line, gap)
        self._log.info("output", attempt=attempt, rank=rank, worker=child.name, message=line)

    def on_child_exit(self, child: Child, end: ProcessEnd) -> None:
        """Handle the end of a forked process."""
        match child.job:
            case WorkerJob() | TemplateJob():
                if isinstance(child.job, WorkerJob) and child.job.launches and child.killed_because:
                    self.on_child_log(child, f"{CUT_OFF}: {child.killed_because}")
                self._worker_pool.on_exit(child, end)
            case StoreJob():
                self._rendezvous.record_end()
                self._background.run(self._rendezvous.fork_again, self.io)
            case FrozenCopy() as copy:
                self._saves.on_exit(copy, end)
            case FetcherJob():
                self._background.run(self._fetching.fork, self.io)

    def on_zygote_exit(self) -> None:
        if self._closing.is_set():
            return
        early = self._child_processes.age_s() < ZYGOTE_EARLY_S
        self._zygotes_lost_early = self._zygotes_lost_early + 1 if early else 0
        if self._zygotes_lost_early < ZYGOTE_LIVES:
            self._background.run(self._replace_zygote)
            self._on_zygote_lost(None)
            return
        unfit = (
            f"its zygote ended {ZYGOTE_LIVES} times in a row within {ZYGOTE_EARLY_S:g} s of its "
            "start: look for what ends it in the node's system log"
        )
        self._on_zygote_lost(ZygoteFailed(unfit))

    def _replace_zygote(self) -> None:
        self._child_processes.ensure()
        self.io.watch_zygote(self._child_processes.pid)
