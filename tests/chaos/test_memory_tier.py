"""Scripts that keep memory checkpoints: kills and lost nodes cost at most a step, and no bit."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from tests.support.nodes.supervised import SupervisedRun
from tests.support.programs.worlds import (
    attempts,
    printed,
    program_training,
    running_program,
    wait_next_attempt,
)

from holdfast_service.job_model.supervisor_protocol import EventKind
from holdfast_service.placement.world_shape import WorldShape
from holdfast_workers.memory.segment import Segment

pytestmark = pytest.mark.chaos

FSDP2 = """
    import sys, time
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from holdfast.torch import tier

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    layers = [torch.nn.Linear(16, 16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 4)]
    model = torch.nn.Sequential(*layers)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    torch.manual_seed(7 + rank)

    def state(done):
        of_model, of_optimizer = get_state_dict(model, optimizer)
        return {
            "model": of_model,
            "optimizer": of_optimizer,
            "done": done,
            f"rng{rank}": torch.get_rng_state(),
        }

    kept, done = tier(), 0
    if (newest := kept.newest()) is not None:
        loaded = state(0)
        dcp.load(loaded, storage_reader=kept.at(newest))
        set_state_dict(
            model,
            optimizer,
            model_state_dict=loaded["model"],
            optim_state_dict=loaded["optimizer"],
        )
        done = loaded["done"]
        torch.set_rng_state(loaded[f"rng{rank}"])
    print(f"rank {rank} goes on from {done}")
    for step in range(done + 1, int(sys.argv[1]) + 1):
        data = torch.randn(8, 16, generator=torch.Generator().manual_seed(step * 10 + rank))
        loss = model(data).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item():.9f} rank {rank}")
        dcp.save(state(step), storage_writer=kept.at(step))
        time.sleep(0.02)
    dist.barrier()
"""


STEPS = 50
TRAINING = program_training(script=f"train.py {STEPS}")
Losses = dict[tuple[int, int], str]


@pytest.fixture(scope="module")
def undisturbed_losses(tmp_path_factory: pytest.TempPathFactory) -> Losses:
    folder = tmp_path_factory.mktemp("undisturbed")
    with running_program(folder, {"train.py": FSDP2}, TRAINING) as run:
        assert run.wait_end()["outcome"] == "SUCCEEDED"
        found = losses(run.logs)
    assert len(found) == 2 * STEPS
    return found


def losses(lines: list[str]) -> Losses:
    """The loss of each step and rank, of its last computation."""
    found = (line.split() for line in lines if line.startswith("step "))
    return {(int(words[1]), int(words[5])): words[3] for words in found}


def resumed_at(lines: list[str]) -> list[int]:
    return [int(line.split()[-1]) for line in lines if " goes on from " in line]


def own_segment(run: SupervisedRun, rank: int) -> Segment:
    """The rank's segment on its own node."""
    [path] = run.agents.root.glob(f"*/*/own-{rank}.seg")
    return Segment.open(path)


def test_an_fsdp2_script_goes_on_from_memory_after_kills_and_a_lost_node(
    tmp_path: Path, undisturbed_losses: Losses
) -> None:
    with running_program(tmp_path, {"train.py": FSDP2}, TRAINING, standbys=1) as run:
        for number, rank in enumerate((1, 0)):
            printed(run, f"step {10 + 10 * number} ")
            before = attempts(run)
            os.kill(run.member(rank)["pid"], signal.SIGKILL)
            wait_next_attempt(run, before)
        printed(run, "step 35 ")
        before, seat = attempts(run), run.seat_of(0)
        run.agents.kill_node(seat)
        wait_next_attempt(run, before)
        end = run.wait_end()
        assert end["outcome"] == "SUCCEEDED", run.story()
        starts = sorted(set(resumed_at(run.logs)))
        assert len(starts) == 4, starts
        assert all(found >= at - 2 for found, at in zip(starts, [0, 10, 20, 35], strict=True))
        tiers = {
            tier for each in run.of(EventKind.INCIDENT_CLOSED) for tier in each["tiers"].values()
        }
        assert tiers == {"own_ram", "partner_ram"}, run.story()
        # The last lines of rank 0 may have been lost with its node.
        lost = {(step, 0): undisturbed_losses[step, 0] for step in range(30, starts[-1] + 1)}
        assert lost | losses(run.logs) == undisturbed_losses


@pytest.mark.cell("P4", "program")
def test_a_damaged_step_in_memory_is_not_loaded(tmp_path: Path, undisturbed_losses: Losses) -> None:
    with running_program(tmp_path, {"train.py": FSDP2}, TRAINING) as run:
        printed(run, "step 12 ")  # so all ranks have saved step 11; memory keeps two steps
        os.kill(run.member(0)["pid"], signal.SIGSTOP)
        with own_segment(run, 1) as segment:
            for commit in segment.commits():
                segment._slot(commit.slot)[64] ^= 1
        before = attempts(run)
        os.kill(run.member(1)["pid"], signal.SIGKILL)
        wait_next_attempt(run, before)
        assert run.wait_end()["outcome"] == "SUCCEEDED", run.story()
        incident = run.of(EventKind.INCIDENT_CLOSED)[-1]
        assert incident["cause"] == "bad_state", run.story()
        assert incident["tiers"] == {"0": "own_ram", "1": "partner_ram"}
        assert resumed_at(run.logs)[-1] >= 10
        assert losses(run.logs) == undisturbed_losses


@pytest.mark.soak
def test_a_script_goes_on_from_memory_with_fewer_ranks_and_with_more(tmp_path: Path) -> None:
    partial = "planner=dcp.DefaultLoadPlanner(allow_partial_load=True)"
    reader = "storage_reader=kept.at(newest)"
    script = FSDP2.replace(reader, f"{reader}, {partial}")  # a new rank has no random state there
    shapes = tuple(WorldShape.of({"dp_shard": ranks, "tp": 1}, 1) for ranks in (2, 1))
    config = {"shapes": shapes, "grow_after_s": 0.5, "wait_for_replacement_s": 0.5}
    training = program_training(script="train.py 5000")
    with running_program(tmp_path, {"train.py": script}, training, config=config) as run:

        def sizes() -> list[int]:
            return [event["world_size"] for event in run.of(EventKind.ATTEMPT_FORMING)]

        printed(run, "step 10 ")
        lost = run.seat_of(1)
        run.agents.kill_node(lost)
        run.wait(lambda: sizes() == [2, 1])
        shrunk = run.of(EventKind.ATTEMPT_FORMING)[-1]["restore"]
        assert set(shrunk["tiers"].values()) == {"reshard"}, run.story()
        printed(run, f"goes on from {shrunk['step']}")
        run.wait(lambda: any(step > shrunk["step"] + 3 for step, _ in losses(run.logs)))
        run.agents.return_node(lost)
        run.wait(lambda: sizes() == [2, 1, 2])
        grown = run.of(EventKind.ATTEMPT_FORMING)[-1]["restore"]
        assert set(grown["tiers"].values()) == {"reshard"}, run.story()
        run.wait(lambda: resumed_at(run.logs)[-2:] == [grown["step"]] * 2)
        run.wait(
            lambda: any(rank == 1 and step > grown["step"] + 3 for step, rank in losses(run.logs))
        )
        meshes = {path.parent.name for path in run.agents.root.glob("*/*/*.seg")}
        assert meshes == {"dp_shard=2,tp=1"}, "the payloads of the smaller world are still there"
