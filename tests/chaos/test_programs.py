"""Users' own scripts and commands, unchanged, under kills, hangs, lost nodes and stops."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil
import pytest
from tests.support.programs.worlds import (
    attempts,
    printed,
    program_training,
    running_program,
    wait_next_attempt,
)
from tests.support.waiting import eventually

from holdfast_service.job_model.supervisor_protocol import EventKind, StopKind
from holdfast_service.placement.world_shape import WorldShape
from holdfast_workers.ipc import linux_processes
from holdfast_workers.spec import DetectionSpec, ProgramSpec

pytestmark = pytest.mark.chaos

DDP = """
    import os, sys, time
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank, attempt = dist.get_rank(), os.environ["TORCHELASTIC_RESTART_COUNT"]
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    done = 0
    if os.path.exists("saved.pt"):
        saved = torch.load("saved.pt")
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        done = saved["step"]
    for step in range(done + 1, int(sys.argv[1]) + 1):
        data = torch.randn(8, 4, generator=torch.Generator().manual_seed(step * 10 + rank))
        loss = model(data).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(f"step {step} loss {loss.item():.9f} attempt {attempt}")
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "step": step}, "saved.pt.new")
            os.replace("saved.pt.new", "saved.pt")
        time.sleep(0.02)
    dist.barrier()
    print(f"rank {rank} has ended")
    dist.destroy_process_group()
"""
ATTACHED = """
    import os, time
    import torch
    import torch.distributed as dist
    from holdfast import attach

    run = attach()
    dist.init_process_group("gloo")
    first = int(open("saved").read()) + 1 if os.path.exists("saved") else 1
    for step in range(first, 1000):
        stops = torch.tensor(float(run.should_stop))
        dist.all_reduce(stops)  # all ranks stop after the same step
        run.step(step, loss=1.0 / step, tokens=8)
        if dist.get_rank() == 0:
            open("saved.new", "w").write(str(step))
            os.replace("saved.new", "saved")
        if stops:
            print(f"rank {dist.get_rank()} stops after step {step}")
            break
        time.sleep(0.02)
"""


def losses(lines: list[str]) -> dict[int, str]:
    """The loss of each step, of its last computation."""
    found = (line.split() for line in lines if line.startswith("step "))
    return {int(words[1]): words[3] for words in found}


def test_a_plain_ddp_script_survives_kills_and_a_lost_node(tmp_path: Path) -> None:
    training = program_training(script="train.py 60")
    with running_program(tmp_path, {"train.py": DDP}, training, standbys=1) as run:
        printed(run, "step 10 ")
        run.inject("segfault", rank=1)
        printed(run, "attempt 1")
        printed(run, "step 25 ")
        before, seat = attempts(run), run.seat_of(1)
        run.agents.kill_node(seat)
        wait_next_attempt(run, before)
        assert run.seat_of(1) != seat
        end = run.wait_end()
        assert end["outcome"] == "SUCCEEDED", run.story()
        for incident in run.of(EventKind.INCIDENT_CLOSED):
            facts = [incident[name] for name in ("level", "restored_step", "steps_lost", "tiers")]
            assert facts == [0, None, None, {}], "the script reports nothing"
            assert "process is alive" not in incident["reason"]
        assert sum("has ended" in line for line in run.logs) == 2
        disturbed = losses(run.logs)
    with running_program(tmp_path / "calm", {"train.py": DDP}, training) as calm:
        assert calm.wait_end()["outcome"] == "SUCCEEDED"
        assert losses(calm.logs) == disturbed
        assert sorted(disturbed) == list(range(1, 61))


def test_a_rank_that_stops_is_named_and_replaced_though_the_script_reports_nothing(
    tmp_path: Path,
) -> None:
    program = ProgramSpec(silence_s=1.5)
    training = program_training(script="train.py 1000", program=program)
    with running_program(tmp_path, {"train.py": DDP}, training) as run:
        printed(run, "step 10 ")
        before = attempts(run)
        run.inject("stop", rank=1)
        wait_next_attempt(run, before)
        [incident] = run.of(EventKind.INCIDENT_CLOSED)
        assert (incident["cause"], incident["lost"][0]["rank"]) == ("hang", 1)
        assert "rank 1 is stopped" in incident["evidence"][0]


def test_a_script_that_waits_for_ever_is_restarted_with_its_stack_in_the_incident(
    tmp_path: Path,
) -> None:
    script = """
        import os, time
        def wait_for_data():
            while os.environ["HOLDFAST_ATTEMPT"] == "1":
                time.sleep(3600)
        print("begins")
        wait_for_data()
    """
    training = program_training(script="-m train", program=ProgramSpec(silence_s=1.0))
    with running_program(tmp_path, {"train.py": script}, training) as run:
        end = run.wait_end()
        assert end["outcome"] == "SUCCEEDED", run.story()
        [incident] = run.of(EventKind.INCIDENT_CLOSED)
        assert incident["cause"] == "hang"
        frames = [frame for stack in incident["stacks"] for frame in stack["frames"]]
        assert any("wait_for_data" in frame for frame in frames)


@pytest.mark.cell("P5", "program")
def test_steps_that_a_program_reports_are_rows_and_a_hang_is_found_by_them(tmp_path: Path) -> None:
    training = program_training(
        script="train.py",
        program=ProgramSpec(step_limit_s=1.0),
        detection=DetectionSpec(hang_floor_s=0.5),
    )
    with running_program(tmp_path, {"train.py": ATTACHED}, training) as run:
        run.wait_step(10)
        assert run.rows[10].loss == pytest.approx(0.1)
        assert run.rows[10].tokens == 8
        assert run.of(EventKind.PROGRAM_ATTACHED)[0]["level"] == 1
        before = attempts(run)
        os.kill(run.member(1)["pid"], signal.SIGSTOP)
        wait_next_attempt(run, before)
        [incident] = run.of(EventKind.INCIDENT_CLOSED)
        assert "rank 1 is stopped" in incident["evidence"][0]
        run.wait(lambda: run.of(EventKind.PROGRAM_RESUMED)[-1]["attempt"] > 1)
        resumed = run.of(EventKind.PROGRAM_RESUMED)[-1]
        assert resumed["first_step"] == resumed["restored_step"] + 1
        facts = [incident[name] for name in ("level", "restored_step", "steps_lost", "tiers")]
        assert facts == [1, resumed["restored_step"], resumed["steps_lost"], {}]
        run.stop(StopKind.PAUSE)
        end = run.wait_end()
        assert end["outcome"] == "PAUSED", run.story()
        assert "stops after step" in printed(run, "rank 1 stops")
        assert end["step"] >= resumed["first_step"]


def test_what_a_program_has_started_dies_with_it(tmp_path: Path) -> None:
    script = """
        echo "child $BASHPID"
        setsid sleep 1000 &
        echo "helper $!"
        sleep 1001
    """
    training = program_training(command="bash run.sh", ranks=1)
    with running_program(tmp_path, {"run.sh": script}, training) as run:
        helper = int(printed(run, "helper ").split()[1])
        before = attempts(run)
        os.kill(run.member(0)["pid"], signal.SIGKILL)
        wait_next_attempt(run, before)
        assert not linux_processes.is_alive(helper)
        printed(run, "helper ")
        launcher = psutil.Process(run.member(0)["pid"]).parent()
        assert launcher is not None
        program = psutil.Process(run.member(0)["pid"])
        before = attempts(run)
        launcher.kill()
        wait_next_attempt(run, before)
        assert not program.is_running() or program.status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("fork", [True, False])
def test_the_exception_of_a_script_is_the_cause_and_not_those_of_its_peers(
    tmp_path: Path, fork: bool
) -> None:
    script = """
        import torch.distributed as dist
        dist.init_process_group("gloo")
        if dist.get_rank() == 1:
            raise ValueError("bad value 3")
        dist.barrier()
    """
    training = program_training(script="train.py", program=ProgramSpec(fork=fork))
    with running_program(tmp_path, {"train.py": script}, training) as run:
        end = run.wait_end()
        assert end["code"] == "user_error", run.story()
        assert end["message"] == "ValueError twice in a row, with no step between: bad value 3"
        assert 'raise ValueError("bad value 3")' in end["traceback"]


def test_an_error_of_a_rank_that_shows_no_steps_ends_the_job_at_its_second_time(
    tmp_path: Path,
) -> None:
    script = """
        import os
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        done = int(open("saved").read()) if os.path.exists("saved") else 0
        for step in range(done + 1, 100):
            dist.all_reduce(torch.ones(1))
            if dist.get_rank() == 1 and step == 13:
                raise ValueError("bad sample")
            if dist.get_rank() == 0:
                print(f"step {step}")
                if step % 5 == 0:
                    open("saved", "w").write(str(step))
    """
    program = ProgramSpec(metrics="step (?P<step>[0-9]+)")
    training = program_training(script="train.py", program=program)
    with running_program(tmp_path, {"train.py": script}, training) as run:
        end = run.wait_end()
        assert end["code"] == "user_error", run.story()
        assert "twice in a row: bad sample" in end["message"]
        assert 'raise ValueError("bad sample")' in end["traceback"]
        assert attempts(run) == 2


def test_a_rank_that_ends_while_the_others_wait_for_it_is_named(tmp_path: Path) -> None:
    script = """
        import time
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        batches = 6 if dist.get_rank() == 1 else 8
        for step in range(1, batches + 1):
            dist.all_reduce(torch.ones(1))
            if dist.get_rank() == 0:
                print(f"step {step}")
    """
    program = ProgramSpec(metrics="step (?P<step>[0-9]+)")
    training = program_training(script="train.py", program=program)
    with running_program(tmp_path, {"train.py": script}, training) as run:
        end = run.wait_end()
        assert end["code"] == "user_error", run.story()
        assert "rank 1 ended with exit code 0 at step 6, and the others" in end["message"]
        assert attempts(run) == 2


def test_a_command_that_does_not_exist_ends_the_job_with_the_reason(tmp_path: Path) -> None:
    training = program_training(command="no-such-program --x", ranks=1)
    with running_program(tmp_path, {}, training) as run:
        end = run.wait_end()
        assert (end["outcome"], end["code"]) == ("FAILED", "user_error")
        assert "exit code 127: cannot run no-such-program" in end["message"]


def test_without_a_lease_a_program_stands_still_until_there_is_a_supervisor_again(
    tmp_path: Path,
) -> None:
    script = """
        import time
        for number in range(100000):
            print(f"at {number}")
            time.sleep(0.02)
    """
    training = program_training(script="train.py", ranks=1)
    config = {"lease_s": 2.0, "lease_margin_s": 1.0}
    with running_program(tmp_path, {"train.py": script}, training, config=config) as run:
        printed(run, "at 10")
        pid = run.member(0)["pid"]
        before = len(run.logs)
        run.end_supervisor()
        run.cluster_answers = False

        def state() -> str:
            return linux_processes.run_state(pid)

        eventually(lambda: state() == "T", failure_message="the program ran on without a lease")
        run.cluster_answers = True
        run.start_supervisor()
        run.wait(lambda: state() != "T")
        assert run.member(0)["pid"] == pid
        # More than it can have printed before it stood still: 50 lines a second.
        run.wait(lambda: len(run.logs) > before + 300)


def test_a_script_goes_on_with_fewer_ranks_and_grows_again(tmp_path: Path) -> None:
    shapes = tuple(WorldShape.of({"dp_shard": ranks, "tp": 1}, 1) for ranks in (2, 1))
    training = program_training(script="train.py 2000")
    config = {"shapes": shapes, "grow_after_s": 0.5, "wait_for_replacement_s": 0.5}
    with running_program(tmp_path, {"train.py": DDP}, training, config=config) as run:

        def sizes() -> list[int]:
            return [event["world_size"] for event in run.of(EventKind.ATTEMPT_FORMING)]

        printed(run, "step 10 ")
        lost = run.seat_of(1)
        run.agents.kill_node(lost)
        run.wait(lambda: sizes() == [2, 1])
        printed(run, "attempt 1")
        run.agents.return_node(lost)
        run.wait(lambda: sizes() == [2, 1, 2])
        printed(run, "attempt 2")
        run.stop(StopKind.CANCEL)
        assert run.wait_end()["outcome"] == "CANCELLED", run.story()
        computed = [int(line.split()[1]) for line in run.logs if line.startswith("step ")]
        assert sorted(set(computed)) == list(range(1, max(computed) + 1))


@pytest.mark.cell("P6", "program")
def test_before_a_node_goes_the_program_is_asked_to_save_and_loses_no_step(tmp_path: Path) -> None:
    training = program_training(script="train.py")
    with running_program(tmp_path, {"train.py": ATTACHED}, training, standbys=1) as run:
        run.wait_step(10)
        leaving = run.seat_of(1)
        before = attempts(run)
        node = run.member(1)["node_id"]
        run.agents.draining_nodes = {node: time.time() + 60}
        wait_next_attempt(run, before)
        assert run.seat_of(1) != leaving
        run.wait(lambda: run.of(EventKind.PROGRAM_RESUMED)[-1]["attempt"] > 1)
        assert run.of(EventKind.PROGRAM_RESUMED)[-1]["steps_lost"] == 0
        assert "stops after step" in printed(run, "rank 1 stops")
        [incident] = run.of(EventKind.INCIDENT_CLOSED)
        assert incident["cause"] == "preempted", run.story()


def test_without_a_lease_nothing_that_a_program_has_started_goes_on(tmp_path: Path) -> None:
    script = """
        setsid bash -c 'while true; do :; done' &
        echo "apart $!"
        wait
    """
    training = program_training(command="bash run.sh", ranks=1)
    config = {"lease_s": 2.0, "lease_margin_s": 1.0}
    with running_program(tmp_path, {"run.sh": script}, training, config=config) as run:
        apart = int(printed(run, "apart ").split()[1])
        run.end_supervisor()
        run.cluster_answers = False
        is_stopped = lambda: linux_processes.run_state(apart) == "T"  # noqa: E731
        eventually(is_stopped, failure_message="it runs on without a lease")
