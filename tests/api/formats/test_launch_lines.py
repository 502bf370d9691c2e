"""Launch lines of other programs become specs: torchrun, python, and any executable."""

from __future__ import annotations

import shlex
from pathlib import PurePath

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from torch.distributed.run import get_args_parser

from holdfast.formats.launch_lines import (
    TORCHRUN_OPTIONS,
    LaunchLine,
    UnreadableLaunchLine,
    combined,
    cpus_per_rank,
    gpus_per_rank,
    nodes_of,
    notice,
    ranks_of,
    read,
    spec_of,
)
from holdfast_service.job_model.job_spec import parse

CODE = f"sha256:{0:064}"
WORDS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8)
TORCHRUN = ("torchrun", "python -m torch.distributed.run", "/opt/bin/torchrun")


def line(text: str) -> LaunchLine:
    return read(shlex.split(text))


@pytest.mark.parametrize(
    ("text", "script"),
    [
        ("train.py --lr 3e-4", "train.py --lr 3e-4"),
        ("python train.py 'two words'", "train.py 'two words'"),
        ("/usr/bin/python3.12 -u train.py", "train.py"),
        ("python -m pkg.train -m x", "-m pkg.train -m x"),
        ("torchrun train.py --nnodes 3", "train.py --nnodes 3"),
        ("torchrun -m pkg.train --lr 1", "-m pkg.train --lr 1"),
        ("torchrun -- train.py", "train.py"),
        ("-m pkg", "-m pkg"),
    ],
)
def test_a_python_program_becomes_a_script(text: str, script: str) -> None:
    assert shlex.join(line(text).script) == script


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ("node train.js --x", "node train.js --x"),
        ("python -c 'print(1)'", "python -c 'print(1)'"),
        ("python -X dev train.py", "python -X dev train.py"),
        ("torchrun --no-python ./trainer a", "./trainer a"),
        ("./train.sh a", "bash ./train.sh a"),
    ],
)
def test_any_other_program_becomes_a_command(text: str, command: str) -> None:
    assert shlex.join(line(text).command) == command


@pytest.mark.parametrize("torchrun", TORCHRUN)
def test_the_sizes_of_torchrun_become_those_of_the_job(torchrun: str) -> None:
    found = line(f"{torchrun} --nproc_per_node=4 --nnodes 2 --rdzv-id 7 -r 3 train.py")
    assert (found.nproc, found.nodes) == (4, (2, 2))
    assert len(found.notices) == 2 and "--rdzv-id is ignored" in found.notices[0]
    spec = spec_of(found)
    assert spec == {
        "name": "train",
        "script": ["train.py"],
        "parallel": {"dp_shard": 8},
        "resources": {"workers_per_node": 4},
    }
    assert parse({**spec, "code": CODE}, None).nodes == 2


def test_a_range_of_nodes_becomes_an_elastic_job() -> None:
    spec = parse(spec_of(line("torchrun --nnodes=1:4 --nproc-per-node=2 -m pkg")), None)
    assert [shape.world_size for shape in spec.shapes] == [8, 6, 4, 2]


def test_sizes_given_to_holdfast_come_first() -> None:
    given_twice = combined(line("torchrun --nproc-per-node 2 --nnodes 2 a.py"), "3", None)
    assert (given_twice.nproc, given_twice.nodes) == (3, (2, 2))


def test_a_notice_tells_what_holdfast_does_and_each_reason_is_told_once() -> None:
    found = line("torchrun --rdzv-backend c10d --rdzv-endpoint a:1 --standalone a.py")
    assert len(found.notices) == 1 and "new rendezvous store" in found.notices[0]
    assert "recovery.max_failures" in notice("--max-restarts")


def test_every_option_of_the_installed_torchrun_is_known() -> None:
    options = {
        name.replace("_", "-")
        for action in get_args_parser()._actions
        for name in action.option_strings
        if name.startswith("--")
    }
    assert options - TORCHRUN_OPTIONS == {"--help"}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "nothing to start"),
        ("torchrun", "is given no script"),
        ("python", "is given no script"),
        ("python -m", "name of a module"),
        ("torchrun --nnodes", "needs a value"),
        ("torchrun --nproc-per-node gpu a.py", "--gpus 1"),
        ("torchrun --nproc-per-node 0 a.py", "not a number"),
        ("torchrun --nnodes 4:2 a.py", "1:4"),
        ("torchrun --lr 3 a.py", "not an option of torchrun"),
        ("accelerate launch a.py", "holdfast run --nproc-per-node N -- train.py"),
        ("python -m accelerate.commands.launch a.py", "Accelerator("),
        ("deepspeed a.py", "init_distributed"),
        ("srun python a.py", "Slurm"),
    ],
)
def test_what_cannot_run_is_refused_with_what_to_write(text: str, told: str) -> None:
    with pytest.raises(UnreadableLaunchLine, match=f".*{told.replace('(', '.')}.*"):
        line(text)


def test_an_absolute_path_in_the_code_folder_becomes_relative() -> None:
    found = read(["python", "/code/src/a.py", "/code/x"], PurePath("/code"))
    assert found.script == ("src/a.py", "/code/x")
    assert read(["/elsewhere/a.py"], PurePath("/code")).script == ("/elsewhere/a.py",)


@given(st.lists(WORDS, max_size=6))
def test_the_words_of_a_script_arrive_as_they_are(words: list[str]) -> None:
    for start in (["train.py"], ["python", "train.py"], ["torchrun", "train.py"]):
        spec = parse({**spec_of(read([*start, *words])), "code": CODE}, None)
        assert spec.script == ("train.py", *words)


@given(
    st.lists(
        WORDS
        | st.sampled_from(["torchrun", "python", "-m", "--nnodes", "2", "--", "a.py", *TORCHRUN])
    )
)
def test_any_words_become_a_job_or_a_refusal(words: list[str]) -> None:
    try:
        found = read(words)
    except UnreadableLaunchLine as refusal:
        assert str(refusal)
        return
    assert bool(found.script) != bool(found.command)
    assert parse({"name": spec_of(found)["name"], "command": "x"}, None)


@given(st.integers(1, 5), st.integers(1, 9), st.integers(0, 3))
def test_the_nodes_of_a_spec_hold_its_ranks(nodes: int, per_node: int, standbys: int) -> None:
    spec = spec_of(line(f"torchrun --nnodes {nodes} --nproc-per-node {per_node} train.py"))
    spec["resources"]["standby_nodes"] = standbys
    assert (nodes_of(spec), ranks_of(spec)) == (nodes + standbys, nodes * per_node)
    parsed = parse({**spec, "code": CODE}, None)
    assert nodes_of(spec) == parsed.nodes


def test_an_elastic_spec_may_use_its_most_nodes() -> None:
    spec = spec_of(line("torchrun --nnodes 1:4 --nproc-per-node 2 train.py"))
    assert (nodes_of(spec), ranks_of(spec)) == (4, None)


def test_only_the_axes_of_the_mesh_are_numbers_of_ranks() -> None:
    """Before, every number in `parallel` was one, and `false` was none at all."""
    sharded = {"dp_shard": 4, "zero": 3, "stages_per_rank": None}
    assert ranks_of({"parallel": sharded}) == 4
    assert ranks_of({"parallel": {"tp": 2, "sequence_parallel": False}}) == 2
    assert ranks_of({"parallel": {"pp": 2, "dp_shard": 2, "schedule": "gpipe"}}) == 4
    assert ranks_of({"parallel": {"dp_shard": "auto", "tp": 2}}) is None


@pytest.mark.parametrize("junk", ["x", None, [], {}, 1.5, {"dp_shard": "two"}])
def test_a_spec_that_makes_no_sense_still_has_a_number_of_nodes(junk: object) -> None:
    """The server reports what is wrong with it."""
    for spec in ({"parallel": junk}, {"resources": junk}, {"resources": {"nodes": junk}}):
        assert nodes_of(spec) == 1
    assert nodes_of({"resources": {"workers_per_node": junk, "standby_nodes": junk}}) == 1


@example(25, [7])  # 0.28 of 7: as floats, 25 of them are a little more than 7
@given(st.integers(1, 64), st.lists(st.integers(1, 64), min_size=1))
def test_ranks_share_the_processors_of_the_smallest_node(ranks: int, cpus: list[int]) -> None:
    each = cpus_per_rank(ranks, cpus)
    thousandths = round(1000 * each)  # Ray counts in ten thousandths
    assert 0 < thousandths * ranks <= 1000 * min(cpus)
    assert each == 0.5 or each == pytest.approx(min(cpus) / ranks, abs=0.001)


@given(st.lists(st.floats(0, 16)))
def test_a_rank_gets_a_gpu_where_any_node_has_one(gpus: list[float]) -> None:
    assert gpus_per_rank(gpus) == (1 if sum(gpus) > 0 else 0)
    assert gpus_per_rank([*gpus, 8.0]) == 1
