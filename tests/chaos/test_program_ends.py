"""Programs are not ended without need, and have their time where they must end."""

from __future__ import annotations

import re
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

from holdfast_service.job_model.supervisor_protocol import EventKind, StopKind
from holdfast_workers.ipc.line_budget import BURST_LINES
from holdfast_workers.spec import DetectionSpec, ProgramSpec

pytestmark = pytest.mark.chaos


def test_a_program_that_attaches_long_before_its_first_step_is_left_alone(tmp_path: Path) -> None:
    script = """
        import time
        from holdfast import attach

        run = attach()
        until = time.monotonic() + 4
        while time.monotonic() < until:
            pass
        print("prepared")
        run.step(1)
    """
    training = program_training(
        script="train.py",
        program=ProgramSpec(silence_s=1.0, step_limit_s=1.0),
        detection=DetectionSpec(hang_floor_s=0.5),
    )
    config = {"stall_limit_s": 1.0}
    with running_program(tmp_path, {"train.py": script}, training, config=config) as run:
        assert run.wait_end()["outcome"] == "SUCCEEDED", run.story()
        assert attempts(run) == 1


def test_another_supervisor_leaves_a_program_without_steps_alone(tmp_path: Path) -> None:
    script = """
        import time
        for number in range(300):
            print(f"at {number}")
            time.sleep(0.02)
    """
    training = program_training(script="train.py")
    config = {"stall_limit_s": 1.0}
    with running_program(tmp_path, {"train.py": script}, training, config=config) as run:
        printed(run, "at 20")
        run.lose_supervisor()
        assert run.wait_end()["outcome"] == "SUCCEEDED", run.story()
        assert len(run.of(EventKind.ATTEMPT_FORMING)) == 1


def test_another_supervisor_adopts_an_attempt_of_which_one_rank_has_ended(tmp_path: Path) -> None:
    script = """
        import os, time
        if os.environ["RANK"] == "0":
            for number in range(200):
                print(f"saves {number}")
                time.sleep(0.02)
        else:
            print("rank 1 has ended")
    """
    training = program_training(script="train.py")
    with running_program(tmp_path, {"train.py": script}, training) as run:
        printed(run, "rank 1 has ended")
        printed(run, "saves 20")
        run.lose_supervisor()
        assert run.wait_end()["outcome"] == "SUCCEEDED", run.story()
        assert len(run.of(EventKind.ATTEMPT_FORMING)) == 1


def test_a_program_without_enough_nodes_is_queued_again_and_not_done(tmp_path: Path) -> None:
    script = """
        import time
        from holdfast import attach
        from holdfast.torch import tier

        run, kept = attach(), tier()
        for step in range(301, 100000):
            kept.save(step, step)
            run.step(step)
            time.sleep(0.02)
    """
    training = program_training(script="train.py")
    config = {"wait_for_replacement_s": 0.5, "on_shortage": "queue"}
    with running_program(tmp_path, {"train.py": script}, training, config=config) as run:
        run.wait_step(310)
        run.agents.kill_node(run.seat_of(1))
        end = run.wait_end()
        assert (end["outcome"], end["code"]) == ("PAUSED", "no_nodes"), run.story()
        assert "those in memory are not" in end["message"]


def test_a_script_with_data_loaders_has_time_to_save_when_it_is_asked_to_end(
    tmp_path: Path,
) -> None:
    script = """
        import signal, time
        import torch

        stops = False
        def stop(*_):
            global stops
            stops = True
        signal.signal(signal.SIGTERM, stop)
        data = torch.utils.data.DataLoader(list(range(100000)), num_workers=2)
        for number, _ in enumerate(data):
            if number == 10:
                print("loads")
            if stops:
                time.sleep(0.2)
                print("saved before the end")
                break
            time.sleep(0.01)
    """
    training = program_training(script="train.py", ranks=1)
    with running_program(tmp_path, {"train.py": script}, training) as run:
        printed(run, "loads")
        run.stop(StopKind.CANCEL)
        assert run.wait_end()["outcome"] == "CANCELLED", run.story()
        assert printed(run, "saved before the end")


def test_a_program_whose_state_in_memory_is_older_than_its_own_shows_where_it_goes_on(
    tmp_path: Path,
) -> None:
    script = """
        import time
        from holdfast import attach
        from holdfast.torch import tier

        run, kept = attach(), tier()
        first = 1 if run.attempt == 1 else 3
        for step in range(first, 100000):
            kept.save(step, step)
            run.step(step)
            time.sleep(0.02)
    """
    program = ProgramSpec(grace_s=0.2)
    training = program_training(script="train.py", ranks=1, program=program)
    with running_program(tmp_path, {"train.py": script}, training) as run:
        run.wait_step(20)
        before = attempts(run)
        run.inject("kill", rank=0)
        wait_next_attempt(run, before)
        run.wait(lambda: run.of(EventKind.PROGRAM_RESUMED)[-1]["attempt"] > 1)
        assert run.of(EventKind.PROGRAM_RESUMED)[-1]["restored_step"] == 2
        run.stop(StopKind.CANCEL)
        run.wait_end()


def test_ranks_that_have_not_met_start_again_when_their_store_ends(tmp_path: Path) -> None:
    script = """
        import os, time
        import torch.distributed as dist

        print("prepares")
        while os.environ["HOLDFAST_ATTEMPT"] == "1":
            time.sleep(0.02)
        dist.init_process_group("gloo")
        print("met")
    """
    training = program_training(script="train.py")
    with running_program(tmp_path, {"train.py": script}, training) as run:
        printed(run, "prepares")
        agent = run.agents.agents[run.seat_of(0)].process
        assert agent is not None
        children = psutil.Process(agent.pid).children()
        (store,) = (child for child in children if child.name() == "hf-store")
        store.kill()
        assert run.wait_end()["outcome"] == "SUCCEEDED", run.story()
        assert sum(line == "met" for line in run.logs) == 2
        (incident,) = run.of(EventKind.INCIDENT_CLOSED)
        assert incident["cause"] == "communication"
        assert "ended before the first step" in incident["evidence"][0]


def test_every_line_of_a_program_is_logged_or_counted_in_a_mark(tmp_path: Path) -> None:
    """Of a program that prints more at once than a log takes, and ends in the middle of a line."""
    number = BURST_LINES + 20_000
    script = f"""
        import os
        for number in range({number}):
            print(f"line {{number}}")
        print("last words", end="")
        os._exit(0)
    """
    with running_program(
        tmp_path, {"train.py": script}, program_training(script="train.py", ranks=1)
    ) as run:
        assert run.wait_end()["outcome"] == "SUCCEEDED", run.story()
        run.wait(lambda: "last words" in run.logs)
        at = 0
        for text in run.logs:
            if missing := re.match(r"WARNING +\.\.\. ([0-9,]+) lines .* of rank 0 left out", text):
                at += int(missing[1].replace(",", ""))
            elif text.startswith("line "):
                assert text == f"line {at}"
                at += 1
        assert at == number
        assert run.logs[: BURST_LINES + 1][-1] == f"line {BURST_LINES - 1}"
