"""Jobs submitted over REST train on Ray, lose processes and nodes, and end with the same bits."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml
from safetensors.numpy import load_file
from tests.end_to_end.conftest import (
    ONE_NODE,
    PLANTED,
    REPOSITORY,
    STEPS,
    UNDISTURBED,
    WITHOUT_STANDBY,
    Product,
    spec,
)
from tests.support.ranks.recipes import SLOW_WHILE
from tests.support.ranks.toy_images import write_images
from tests.support.wheels import make_wheel

from holdfast.integrations.ray_train.run_folder import read_list, read_result
from holdfast_service.diagnosis.grades import Grade
from holdfast_service.embedded_cluster import local_cluster, processes

pytestmark = [pytest.mark.cluster, pytest.mark.chaos, pytest.mark.timeout(240)]
FUNCTION_STEPS = 110
MARKED = re.compile(r"<!-- run -->\n```sh\n(.*?)```", re.DOTALL)


def assert_same(product: Product, job_id: str, undisturbed: dict[int, str]) -> None:
    """Succeeded, with the undisturbed run's digests, numbered events, and nothing left."""
    ended = product.finish(job_id)
    assert ended.state == "SUCCEEDED", ended.outcome
    digests = product.client.digests(job_id)
    assert {step: digests.get(step) for step in undisturbed} == undisturbed
    events = product.client.events(job_id, limit=1000).items
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    product.wait(lambda: not product.left_of(job_id), 60)


@pytest.mark.story("recipe")
@pytest.mark.cell("P6", "server")
def test_killed_ranks_are_replaced_and_a_killed_supervisor_or_server_costs_nothing(
    product: Product, undisturbed: dict[int, str]
) -> None:
    client = product.client
    job = client.submit(spec(resources=WITHOUT_STANDBY))
    product.wait_step(job.id, 10)
    before = product.members(job.id)
    product.kill_rank(job.id, 0, 3)
    product.wait(lambda: any(incident.closed_at for incident in client.incidents(job.id)))
    attempts = len(client.attempts(job.id))
    (supervisor,) = product.actor_pids("SupervisorActor")
    client.inject(job.id, "supervisor_death")
    product.wait(lambda: supervisor not in product.actor_pids("SupervisorActor"))
    product.kill()
    product.start()
    assert_same(product, job.id, undisturbed)
    assert len(product.client.attempts(job.id)) == attempts, "only the killed ranks cost an attempt"
    (incident, *_) = product.client.incidents(job.id)
    assert incident.cause == "worker_crash"
    assert incident.steps_lost is not None and incident.steps_lost <= 1
    assert {member.node_id for member in product.members(job.id).values()} == {
        member.node_id for member in before.values()
    }


@pytest.mark.cell("P5", "node")
def test_every_node_is_inspected(product: Product) -> None:
    checked = product.client.check_cluster()
    grades = {(found.node, found.grade) for found in checked.findings if found.what == "node"}
    assert checked.nodes == len(product.cluster.nodes) == len(grades)
    assert {grade for _, grade in grades} == {Grade.GOOD}, checked.findings


@pytest.mark.soak
def test_a_vision_job_that_loses_a_rank_succeeds(product: Product, tmp_path: Path) -> None:
    write_images(tmp_path / "images", size=32)
    sizes = {"image_size": 32, "patch_size": 4, "classes": 4}
    model = {"family": "vit", "dim": 64, "layers": 2, "heads": 4, **sizes}
    data = {"source": str(tmp_path / "images")}
    train = {**spec()["train"], "steps": 4 * STEPS}
    job = product.client.submit(
        spec(name="images", model=model, data=data, train=train, **ONE_NODE)
    )
    product.wait_step(job.id, 5)
    product.kill_rank(job.id, 1)
    ended = product.finish(job.id)
    assert ended.state == "SUCCEEDED", ended.outcome
    assert [incident.cause for incident in product.client.incidents(job.id)] == ["worker_crash"]
    assert sorted(product.samples(job.id)) == list(range(1, 4 * STEPS + 1))


@pytest.mark.soak
def test_a_second_installation_on_the_cluster_ends_no_job_of_the_first(
    product: Product, undisturbed: dict[int, str], tmp_path: Path
) -> None:
    """The second server has an empty database, and looks for remains all the time."""
    second = Product(tmp_path, beside=product.cluster, HOLDFAST_PACE__REAP_INTERVAL_S="0.2")
    second.start()
    try:
        mine = product.client.submit(spec(resources=WITHOUT_STANDBY))
        product.wait_step(mine.id, 5)
        other = second.client.submit(spec(name="beside", **ONE_NODE))
        assert_same(product, mine.id, undisturbed)
        assert second.finish(other.id).state == "SUCCEEDED"
        assert len(product.client.attempts(mine.id)) == 1
        assert len(second.client.attempts(other.id)) == 1
    finally:
        second.stop()


@pytest.mark.cell("P6", "GCS")
def test_a_rank_recovers_while_rays_control_service_is_silent(
    product: Product, undisturbed: dict[int, str]
) -> None:
    """No call of the supervisor's loop waits for it."""
    job = product.client.submit(spec(resources=WITHOUT_STANDBY))
    product.wait_step(job.id, 10)
    (silent,) = product.pids_of("gcs_server")
    os.kill(silent, signal.SIGSTOP)
    try:
        product.kill_rank(job.id, 1)
        product.wait(lambda: any(found.closed_at for found in product.client.incidents(job.id)))
    finally:
        os.kill(silent, signal.SIGCONT)
    assert_same(product, job.id, undisturbed)


def test_no_process_of_the_cluster_has_the_servers_secrets(product: Product) -> None:
    """What a function sees in its own environment, and what the kernel shows of all others."""
    function = {"recipe": "pretrain", "function": "tests.support.ranks.functions:shows_environment"}
    train = {"steps": 20, "global_batch": 8, "micro_batch": 4}
    variables = {"GREETING": "hello", "RANDOM_SECRET": ""}
    job = product.client.submit(spec(**function, **ONE_NODE, train=train, env=variables))
    product.wait_step(job.id, 1)
    seen = []
    for pid in processes.of_cluster(product.cluster.cluster_id):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            seen.append(Path(f"/proc/{pid}/environ").read_bytes())
    ended = product.finish(job.id)
    assert seen and ended.state == "SUCCEEDED", ended.outcome
    lines = [line.text for line in product.client.logs(job.id, limit=1000).items]
    assert {"variable GREETING=hello", "variable RANDOM_SECRET="} <= {*lines}
    assert "variable NAMED_BY_OPERATOR=yes" in lines
    assert not [line for line in lines if PLANTED in line or line.startswith("variable RAY_")]
    assert not [environ for environ in seen if PLANTED.encode() in environ]
    assert product.client.get(job.id).spec["env"] == variables
    product.wait(lambda: not product.left_of(job.id))


def test_a_cancelled_job_leaves_nothing(product: Product) -> None:
    job = product.client.submit(spec(train={**spec()["train"], "steps": 5000}, **ONE_NODE))
    product.wait_step(job.id, 5)
    product.client.cancel(job.id)
    ended = product.finish(job.id)
    assert ended.state == "CANCELLED" and ended.outcome is not None
    assert f"step {ended.progress.step}, is in the remote tier" in ended.outcome.message
    product.wait(lambda: not product.left_of(job.id))


def test_another_job_starts_from_a_checkpoint_with_the_same_bits(
    product: Product, undisturbed: dict[int, str], tmp_path: Path
) -> None:
    client = product.client
    (first,) = client.list(name=UNDISTURBED)
    # The steps vary: a job may skip a save while the previous save is still being written.
    start = min(saved.step for saved in client.checkpoints(first.id).items if not saved.deleted_at)
    job = client.submit(
        spec(name="goes-on", init_from=f"{first.id}/{start}", resources=WITHOUT_STANDBY)
    )
    ended = product.finish(job.id)
    assert ended.state == "SUCCEEDED", ended.outcome
    assert ended.origin is not None and ended.origin.job == first.id
    digests = client.digests(job.id)
    assert digests == {step: undisturbed[step] for step in range(start, STEPS + 1)}
    kept = {
        saved.step: saved
        for saved in client.checkpoints(first.id).items
        if saved.deleted_at is None
    }
    assert kept[start].needed_by == ()  # the other job has its own checkpoints by now
    assert kept[start].metrics["loss"] > 0
    client.export_checkpoint(job.id, STEPS, tmp_path / "model", hugging_face=True)
    assert "lm_head.weight" in load_file(tmp_path / "model/model.safetensors")


@pytest.mark.story("function")
def test_a_user_function_is_sent_with_its_job_and_recovers(
    product: Product, tmp_path: Path
) -> None:
    """The example with its folder and a package of its own: the replacement of a rank has both."""
    folder = tmp_path / "code"
    shutil.copytree(REPOSITORY / "examples" / "spirals", folder)
    (folder / "packaged.py").write_text("import hf_extra\nfrom train import main as main\n")
    wheel = make_wheel(tmp_path, "hf_extra", "1.0")
    document = yaml.safe_load((folder / "job.yaml").read_text())
    document["function"] = "packaged:main"
    document["runtime_env"] = {"pip": [f"hf-extra @ {wheel.as_uri()}"]}
    # The steps take long enough for a fault: the server polls every two seconds.
    train = {**document["train"], "steps": FUNCTION_STEPS, "global_batch": 2048}
    document |= {"code": str(folder), "train": train, "config": {"width": 512}}
    client = product.client
    job = client.submit(document)
    product.wait_step(job.id, 10)
    product.kill_rank(job.id, 1)
    ended = product.finish(job.id)
    assert ended.state == "SUCCEEDED", ended.outcome
    assert ended.progress.incidents == 1
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    assert ended.packages == (f"hf_extra @ {wheel.as_uri()}#sha256={digest}",)
    lines = client.logs(job.id, limit=1000).items
    assert any("points classified correctly" in line.text for line in lines)
    accuracies = client.metrics(job.id, ["accuracy"])
    assert [point.step for point in accuracies if point.values["accuracy"] is not None] == [
        *range(1, FUNCTION_STEPS + 1)
    ]
    logs = product.node_logs(job.id)
    assert any(
        entry["event"] == "output"
        and entry["rank"] == 0
        and "classified correctly" in entry["message"]
        for entry in logs
    )
    exits = [entry for entry in logs if entry["event"] == "worker_exited"]
    assert any(entry["rank"] == 1 and entry["attempt"] == 1 for entry in exits)
    product.wait(lambda: not product.left_of(job.id), 60)


def marked(page: str) -> list[tuple[str, str]]:
    """The marked commands of a page, each with the page's name."""
    found = [(page, block) for block in MARKED.findall((REPOSITORY / "docs" / page).read_text())]
    assert len(found) >= 2, page
    return found


def run_blocks(product: Product, blocks: Sequence[tuple[str, str]]) -> str:
    """Run marked commands unchanged, one after the other; returns what they print."""
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOLDFAST_DATA_DIR": str(product.data_dir),
        "OMP_NUM_THREADS": "1",
    }
    output = ""
    for page, block in blocks:
        done = subprocess.run(
            ["bash", "-ec", block],
            cwd=REPOSITORY,
            env=environment,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        output += done.stdout
        assert done.returncode == 0, f"{page}: {block}\n{done.stdout}\n{done.stderr}"
    return output


@pytest.mark.story("quickstart")
def test_the_quickstart_works_from_top_to_bottom(product: Product) -> None:
    output = run_blocks(product, marked("index.md"))
    assert "Incident 1 at" in output and "the process of a rank ended unexpectedly" in output
    assert "SUCCEEDED" in output


@pytest.mark.soak
def test_the_commands_of_the_pages_work(product: Product) -> None:
    shutil.rmtree("/tmp/holdfast-data/model", ignore_errors=True)  # of an earlier run
    output = run_blocks(product, (*marked("tutorial.md"), marked("bring.md")[1]))
    assert "points classified correctly" in output
    assert "accuracy  now" in output
    assert "tokens of /tmp/holdfast-data/docs/*.parquet" in output
    assert "40 of 40 steps" in output
    (row,) = (row for row in product.client.list() if row.name == "continued-lm")
    job = product.client.get(row.id)
    model = job.spec["model"]
    assert (job.state, job.progress.step, model["dim"]) == ("SUCCEEDED", 40, 128)
    assert (model["qkv_bias"], model["published"]["dtype"]) == (True, "float32")


@pytest.mark.story("script")
def test_a_script_of_a_user_runs_as_documented_and_survives_a_killed_rank(product: Product) -> None:
    _, block = marked("bring.md")[0]
    command = subprocess.Popen(
        ["bash", "-ec", f"{block.rstrip()} --pause 0.1"],
        cwd=REPOSITORY,
        env={
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HOLDFAST_DATA_DIR": str(product.data_dir),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        product.wait(lambda: any(row.name == "ddp" for row in product.client.list()))
        (row,) = (row for row in product.client.list() if row.name == "ddp")
        product.wait_step(row.id, 6)  # beyond its first checkpoint
        product.kill_rank(row.id, 1)
        output, _ = command.communicate(timeout=90)
    finally:
        command.kill()
    assert command.returncode == 0, output
    job = product.client.get(row.id)
    assert (job.brings, job.level, job.progress.step, job.progress.steps) == ("script", 0, 60, None)
    assert [incident.cause for incident in product.client.incidents(row.id)] == ["worker_crash"]
    losses = {point.step: point.values["loss"] for point in product.client.metrics(row.id)}
    assert sorted(losses) == list(range(1, 61)) and all(losses.values())
    product.wait(lambda: not product.left_of(row.id), 60)


@pytest.mark.cell("P2", "node")
def test_the_node_of_rank_zero_may_be_lost(product: Product, undisturbed: dict[int, str]) -> None:
    """The node does not come back: later tests cannot use three nodes."""
    job = product.client.submit(spec())
    product.wait_step(job.id, 20)
    before = product.members(job.id)
    assert before[0].node_id is not None
    product.client.inject(job.id, "node_loss", rank=0)
    assert_same(product, job.id, undisturbed)
    (incident,) = product.client.incidents(job.id)
    # A busy machine may see the end of the agent long before that of its node.
    assert incident.cause in ("node_lost", "agent_lost"), incident
    after = {member.node_id for member in product.members(job.id).values()}
    assert before[0].node_id not in after
    assert incident.steps_lost is not None and incident.steps_lost <= 1
    assert set(product.samples(job.id)) == set(range(1, STEPS + 1))


def test_an_elastic_job_shrinks_to_the_nodes_that_are_left_and_grows_again(
    product: Product, tmp_path: Path
) -> None:
    client = product.client
    local_cluster.add_node(product.cluster)  # in place of the lost node
    slow = tmp_path / "slow"
    slow.touch()
    job = client.submit(
        spec(
            name="elastic",
            recipe="tests.support.ranks.recipes:SlowWhile",
            env={SLOW_WHILE: str(slow)},
            parallel={"dp_shard": "auto", "tp": 2},
            resources={**WITHOUT_STANDBY, "nodes": {"min": 2, "max": 3}},
            train={**spec()["train"], "steps": 5000, "global_batch": 12},
            recovery={"grow_after_s": 0.3, "grow_min_gain": -1},
        )
    )

    def sizes() -> list[int]:
        return [attempt.world_size for attempt in client.attempts(job.id)]

    product.wait_step(job.id, 5)
    assert sizes() == [6]
    client.inject(job.id, "node_loss", rank=5)
    product.wait(lambda: any(incident.closed_at for incident in client.incidents(job.id)))
    (incident,) = client.incidents(job.id)
    assert (incident.cause, incident.decision) == ("node_lost", "shrink to a smaller mesh")
    assert sizes() == [6, 4]
    local_cluster.add_node(product.cluster)
    product.wait(lambda: sizes() == [6, 4, 6], 90)
    client.resize(job.id, 2)
    product.wait(lambda: sizes() == [6, 4, 6, 4])
    product.wait(lambda: len(product.actor_pids("StartedAgent")) == 2)  # a seat is given back
    client.resize(job.id, None)
    product.wait(lambda: sizes() == [6, 4, 6, 4, 6], 90)
    product.wait_step(job.id, (client.get(job.id).progress.step or 0) + 5)
    client.cancel(job.id)
    last = product.finish(job.id).progress.step or 0
    assert set(product.samples(job.id)) == set(range(1, last + 1))
    product.wait(lambda: not product.left_of(job.id), 60)
    slow.unlink()
    assert_proven_by_a_replay(product, job.id, meshes=5)


def assert_proven_by_a_replay(product: Product, job_id: str, meshes: int) -> None:
    """`holdfast verify` finds every step equal, and ends the replay after the last of them."""
    client = product.client
    command = (sys.executable, "-m", "holdfast", "verify", job_id, "--timeout", "2m")
    environment = {**os.environ, "HOLDFAST_DATA_DIR": str(product.data_dir)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    (replay,) = client.list(name="elastic-replay")
    found = client.comparison(replay.id)
    assert f"{found.equal} of {found.compared} steps equal on {meshes} meshes" in done.stdout
    assert found.until_step == client.get(job_id).progress.step
    assert found.until_step - found.compared < meshes, "only a change of mesh costs a digest"
    assert product.finish(replay.id).state == "CANCELLED"
    assert {incident.steps_lost for incident in client.incidents(replay.id)} == {0}
    product.wait(lambda: not product.left_of(replay.id), 60)


@pytest.mark.story("Ray Train function")
def test_fit_of_a_ray_train_example_runs_a_job_that_outlives_a_rank(
    product: Product, tmp_path: Path
) -> None:
    """`TorchTrainer(...).fit()`, as docs/bring/ray-train.md shows it."""
    client, epochs = product.client, 150
    example = REPOSITORY / "examples" / "ray_train" / "train.py"
    process = subprocess.Popen(
        [sys.executable, str(example), "--epochs", str(epochs), "--storage", str(tmp_path)],
        env={**os.environ, "HOLDFAST_DATA_DIR": str(product.data_dir)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        product.wait(lambda: any(job.name.startswith("ray_train_run") for job in client.list()))
        (job_id,) = [job.id for job in client.list() if job.name.startswith("ray_train_run")]
        product.wait_step(job_id, 5)
        product.kill_rank(job_id, 1)
        output, _ = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 0, output
    assert f"checkpoint_{epochs:06d}" in output.splitlines()[-1]
    ended = client.get(job_id)
    assert (ended.state, ended.progress.step) == ("SUCCEEDED", epochs), ended.outcome
    assert len(client.attempts(job_id)) == 2
    (run,) = tmp_path.iterdir()
    assert len(list(run.glob("checkpoint_*"))) == 2


@pytest.mark.soak
def test_each_row_of_ray_datasets_is_seen_once_per_epoch_though_rank_0_is_killed(
    product: Product, tmp_path: Path
) -> None:
    """`ray_run.datasets`, as docs/bring/ray-train.md shows it. Rank 0 owns the datasets; each rank
    is on a node of its own; tasks of Ray Data import the job's code."""
    functions, epochs = "numbers_job", 2
    (tmp_path / "code").mkdir()
    shutil.copy(
        REPOSITORY / "tests/support/programs/dataset_functions.py",
        tmp_path / "code" / f"{functions}.py",
    )
    document = {
        "name": "datasets",
        "code": str(tmp_path / "code"),
        "ray_train": f"{functions}:read_numbers",
        "ray_run": {
            **{"datasets": f"{functions}:datasets", "storage_path": str(tmp_path)},
            **{"name": "run", "num_to_keep": 2},
        },
        "config": {"epochs": epochs, "kills": [[0, 1, 3, 0]]},
        "parallel": {"dp_shard": 2},
        "resources": {"cpus_per_worker": 0.5, "workers_per_node": 1, "standby_nodes": 0},
    }
    job = product.client.submit(document)
    ended = product.finish(job.id, 180)
    assert ended.state == "SUCCEEDED", ended.outcome
    assert len(product.client.attempts(job.id)) == 2
    last = Path(read_list(tmp_path / "run")[-1].path)
    seen = [json.loads((last / f"seen-{rank}.json").read_text()) for rank in range(2)]
    for epoch in range(epochs):
        assert sorted(seen[0][epoch] + seen[1][epoch]) == list(range(120)), epoch
    result = read_result(tmp_path / "run")
    assert result is not None and len(result["return_value"]["eval"]) == 5


@pytest.mark.cell("P6", "keeper")
def test_an_orderly_shutdown_leaves_no_process_no_segment_and_no_file(product: Product) -> None:
    """Must be the last: it ends the server."""
    cluster = product.cluster
    mark = cluster.cluster_id.encode()
    assert len(_mentioning(mark)) > 4, "there are processes that could be left"
    product.stop()
    assert _mentioning(mark) == set()
    assert not Path(cluster.shm_root).exists()
    assert not Path(cluster.temp_dir).exists()
    assert local_cluster.find(product.data_dir) is None


def _mentioning(mark: bytes) -> set[int]:
    """Living processes in whose environment the cluster's id occurs anywhere, renamed or not."""
    found = set()
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark in environ.read_bytes():
                found.add(int(environ.parent.name))
    return found - {os.getpid()}
