"""Joining and leaving: what a failed join leaves behind must not keep ranks apart."""

from __future__ import annotations

import subprocess
import sys

from torch.distributed import TCPStore

JOIN = """
import sys
import torch
import torch.distributed as dist
from holdfast_workers import groups

port, rank, alone = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "alone"
if alone:
    try:
        groups.join("127.0.0.1", port, 1, rank, 2, 0.5, "cpu")
    except Exception as error:
        assert groups.is_communication_error(error), repr(error)
    else:
        raise SystemExit("nobody else was there")
    groups.leave()
groups.join("127.0.0.1", port, 2, rank, 2, 10.0, "cpu")
total = torch.ones(1)
dist.all_reduce(total)
assert total.item() == 2
groups.leave()
"""


def test_a_rank_whose_join_failed_meets_one_that_comes_fresh() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [
        subprocess.Popen([sys.executable, "-c", JOIN, str(store.port), rank, before])
        for rank, before in (("0", "alone"), ("1", "fresh"))
    ]
    assert [rank.wait(60) for rank in ranks] == [0, 0]
