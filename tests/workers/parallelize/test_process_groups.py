"""Joining and leaving process groups: a failed join must not separate the ranks later, and no other
process takes the place of a rank."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from tests.support.other_users.nobody import listening_ports
from tests.support.other_users.stranger import stranger
from tests.support.waiting import eventually
from torch.distributed import TCPStore

JOIN = """
import sys
import torch
import torch.distributed as dist
from holdfast_workers.parallelize import process_groups

port, rank, alone = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "alone"
if alone:
    try:
        process_groups.join("127.0.0.1", port, 1, rank, 2, 0.5, "cpu")
    except Exception as error:
        assert process_groups.is_communication_error(error), repr(error)
    else:
        raise SystemExit("the join succeeded without a peer")
    process_groups.leave()
process_groups.join("127.0.0.1", port, 2, rank, 2, 60.0, "cpu")
total = torch.ones(1)
dist.all_reduce(total)
assert total.item() == 2
process_groups.leave()
"""


LEAVE_AND_REJOIN = """
import os
import sys
import threading
import time
import torch
import torch.distributed as dist
from holdfast_workers.parallelize import process_groups

port, rank = int(sys.argv[1]), int(sys.argv[2])
for attempt in range(1, 6):
    process_groups.join("127.0.0.1", port, attempt, rank, 2, 60.0, "cpu")
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == 2
    process_groups.leave(keep=True)
assert len(process_groups._kept_groups) == 5
before = len(process_groups.open_sockets())
ended_by = []


class Remains:
    def __del__(self):
        ended_by.append(threading.current_thread())


process_groups._kept_groups.append(Remains())
process_groups.release_kept()
assert process_groups._kept_groups == []
deadline = time.monotonic() + 60
while len(process_groups.open_sockets()) > before - 5:
    assert time.monotonic() < deadline, "their sockets stay open"
    time.sleep(0.01)
while not ended_by:
    assert time.monotonic() < deadline, "the remains are still there"
    time.sleep(0.01)
assert ended_by != [threading.main_thread()], "the next attempt would wait for their end"
os._exit(0)  # as every worker does: gloo's threads may still be ending
"""


@pytest.mark.slow
def test_kept_groups_end_in_the_background() -> None:
    assert together(LEAVE_AND_REJOIN, ("0",), ("1",)) == [0, 0]


@pytest.mark.slow
def test_a_rank_with_a_failed_join_meets_a_fresh_rank() -> None:
    assert together(JOIN, ("0", "alone"), ("1", "fresh")) == [0, 0]


def together(program: str, *ranks: tuple[str, ...]) -> list[int]:
    """Run the ranks' processes, which share one store; return their exit codes."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = [
        subprocess.Popen([sys.executable, "-c", program, str(store.port), *arguments])
        for arguments in ranks
    ]
    return [process.wait(60) for process in processes]


DEAD_STORE = """
import socket
import time
from holdfast_workers.parallelize import process_groups

with socket.create_server(("127.0.0.1", 0)) as listener:
    port = listener.getsockname()[1]
try:
    process_groups.join("127.0.0.1", port, 1, 0, 2, 3600.0, "cpu")
except Exception as error:
    assert process_groups.is_communication_error(error), repr(error)
else:
    raise SystemExit("the join succeeded without a store")
"""

STORE_HOST = """
import time
from torch.distributed import TCPStore

store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(600)
"""

JOIN_UNTIL_THE_STORE_ENDS = """
import sys
import threading
import time
from holdfast_workers.parallelize import process_groups

threading.Timer(0.3, print, ("joining",), {"flush": True}).start()
try:
    process_groups.join("127.0.0.1", int(sys.argv[1]), 1, 0, 2, 3600.0, "cpu")
except Exception as error:
    assert process_groups.is_communication_error(error), repr(error)
"""


@pytest.mark.seconds
def test_a_refused_connection_ends_a_rendezvous_at_once() -> None:
    assert together(DEAD_STORE, ()) == [0]


@pytest.mark.seconds
def test_a_store_that_ends_ends_the_rendezvous_of_all_that_wait_in_it() -> None:
    store = subprocess.Popen(
        [sys.executable, "-c", STORE_HOST],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert store.stdout is not None
    port = store.stdout.readline().strip()
    rank = subprocess.Popen(
        [sys.executable, "-c", JOIN_UNTIL_THE_STORE_ENDS, port], stdout=subprocess.PIPE, text=True
    )
    assert rank.stdout is not None
    assert rank.stdout.readline().strip() == "joining"
    store.kill()
    assert rank.wait(60) == 0
    store.wait(60)


RANK_BESIDE_A_STRANGER = """
import sys
import torch
import torch.distributed as dist
from holdfast_workers.parallelize import process_groups

port, rank = int(sys.argv[1]), int(sys.argv[2])
for attempt in map(int, sys.stdin):
    try:
        process_groups.join("127.0.0.1", port, attempt, rank, 2, 60.0, "cpu")
        total = torch.full((8,), float(rank + 1))
        dist.all_reduce(total)
        print(total.unique().tolist(), flush=True)
    except Exception as error:
        assert process_groups.is_communication_error(error), repr(error)
        print(type(error).__name__, flush=True)
    process_groups.leave()
"""


@pytest.mark.seconds
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may start a program of another user")
def test_another_user_takes_no_place_in_a_process_group() -> None:
    """The stranger connects to the listener of a rank that waits for the other rank."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK_BESIDE_A_STRANGER, str(store.port), str(rank)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
        )
        for rank in range(2)
    ]
    try:
        _begin(ranks[0], 1)
        with stranger() as other:
            eventually(lambda: listening_ports([ranks[0].pid]))
            other.send(*listening_ports([ranks[0].pid]))
            _begin(ranks[1], 1)
            assert "ForeignPeer" in [_answer(rank) for rank in ranks]
        for rank in ranks:
            _begin(rank, 2)
        assert [_answer(rank) for rank in ranks] == ["[3.0]", "[3.0]"]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


def _begin(rank: subprocess.Popen[str], attempt: int) -> None:
    assert rank.stdin is not None
    rank.stdin.write(f"{attempt}\n")
    rank.stdin.flush()


def _answer(rank: subprocess.Popen[str]) -> str:
    assert rank.stdout is not None
    return rank.stdout.readline().strip()
