"""All ranks stop after the same step, whichever is asked to stop, and whenever."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.support.programs.played_world import played_world

from holdfast.integrations.agreed_stop import AgreedStop

PROGRAM = """
import sys
import torch.distributed as dist
from holdfast.integrations.agreed_stop import AgreedStop

dist.init_process_group("gloo")
rank, asked_at = dist.get_rank(), [int(word) for word in sys.argv[1:]]
stop = AgreedStop()
for step in range(1, 41):
    dist.barrier()
    if stop.ask(asked_at[rank] <= step):
        break
    assert stop.gather(rank) == [0, 1]
stop.close()
print(f"stopped after {step}")
dist.destroy_process_group()
"""


@pytest.mark.seconds
@pytest.mark.parametrize(("asked_at", "stopped"), [((99, 7), 8), ((99, 99), 40)])
def test_ranks_stop_after_the_same_step(
    tmp_path: Path, asked_at: tuple[int, int], stopped: int
) -> None:
    script = tmp_path / "script.py"
    script.write_text(PROGRAM)
    paths = {"PYTHONPATH": ":".join(sys.path)}
    arguments = [str(script), *map(str, asked_at)]
    with played_world(tmp_path, arguments, environment=paths, attached=False) as world:
        assert [f"stopped after {stopped}" in said for said in world.wait()] == [True, True]


def test_a_single_process_stops_at_once_and_for_good() -> None:
    stop = AgreedStop()
    assert [stop.ask(wanted) for wanted in (False, True, False)] == [False, True, True]
    assert stop.gather("own") == ["own"]
    stop.close()
