"""What the log of a node says of a rank's output: its lines, and where some are missing."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

from holdfast_workers.agent.child_events import CUT_OFF, ChildEvents
from holdfast_workers.agent.node_log import node_log
from holdfast_workers.agent.run_journal import RunJournal
from holdfast_workers.ipc.line_budget import LeftOut
from holdfast_workers.ipc.linux_processes import ProcessEnd
from holdfast_workers.protocol.processes import WorkerJob


def test_the_log_says_where_lines_of_a_rank_are_missing() -> None:
    journal = RunJournal("n0", "life")
    pool: Any = SimpleNamespace(
        attempt_and_rank=lambda _: (2, 1), on_exit=lambda *_: journal.log("pool", 0, None, "ended")
    )
    unused: Any = None
    events = ChildEvents(
        *(unused, pool, unused, unused, unused, journal, unused, unused),
        threading.Event(),
        node_log(collected=False),
        lambda _: None,
    )
    child: Any = SimpleNamespace(name="w1", job=WorkerJob("", launches=True), killed_because="")
    events.on_child_log(child, "a line")
    events.on_child_log(child, LeftOut(1_234, 5_678))
    events.on_child_exit(child, ProcessEnd(exit_code=0))
    child.killed_because = "it did not leave within 4 s"
    events.on_child_exit(child, ProcessEnd(signal=9))
    lines, left = journal.lines_after(0, 0)
    assert (left, {(line.attempt, line.rank) for line in lines}) == (0, {(2, 1), (0, None)})
    assert [line.text for line in lines] == [
        "a line",
        "WARNING ... 1,234 lines (5,678 bytes) of rank 1 left out: more than 1,000 lines/s",
        "ended",
        f"{CUT_OFF}: it did not leave within 4 s",
        "ended",
    ]
