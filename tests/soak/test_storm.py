"""Mixed faults, also during recoveries: the job ends with the undisturbed run's bits, every sample
is read once, and nothing is left. A short storm and a long one."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.support.faults.random_faults import KINDS, WITH_PARTITIONS, Storm
from tests.support.nodes import namespaces
from tests.support.nodes.namespaces import RemoteAgents
from tests.support.nodes.supervised import small_training, supervised

from holdfast_service.job_model.supervisor_protocol import EventKind
from holdfast_service.supervisor.supervisor_times import SupervisorTimes
from holdfast_workers.fault_injection.kinds import FaultKind
from holdfast_workers.spec import CheckpointSpec, MemoryTierSpec, RemoteTierSpec

pytestmark = [pytest.mark.chaos, pytest.mark.soak]
CHECKPOINT = CheckpointSpec(
    memory=MemoryTierSpec(every_steps=1), remote=RemoteTierSpec(every_steps=20, keep=2)
)
HEARTBEAT_S = 1.0
PATIENT = {"max_failures": 100_000, "max_without_progress": 100_000, "standby_wait_s": 20.0}


@pytest.mark.parametrize(
    ("seed", "faults", "steps", "end_s"),
    [
        pytest.param(1, 28, 140, 120.0, id="short"),
        pytest.param(2, 320, 1600, 600.0, id="long", marks=pytest.mark.timeout(7200)),
    ],
)
def test_a_storm_of_mixed_faults_changes_no_bit_and_leaves_nothing(
    tmp_path: Path, seed: int, faults: int, steps: int, end_s: float
) -> None:
    compare_runs(tmp_path, seed, faults, steps, end_s, KINDS)


@pytest.mark.skipif(bool(namespaces.why_not()), reason=namespaces.why_not() or "namespaces")
@pytest.mark.timeout(7200)
def test_a_storm_with_partitions_changes_no_bit_and_leaves_nothing(tmp_path: Path) -> None:
    across = {
        "agents": RemoteAgents,
        "times": SupervisorTimes(poll_s=0.1, heartbeat_timeout_s=HEARTBEAT_S),
        "heartbeat_s": HEARTBEAT_S / 8,
    }
    compare_runs(tmp_path, 3, 320, 1600, 900.0, WITH_PARTITIONS, **across)


def compare_runs(
    tmp_path: Path,
    seed: int,
    faults: int,
    steps: int,
    end_s: float,
    kinds: dict[FaultKind, int],
    **stormy_options: Any,
) -> None:
    """Compare an undisturbed run with a run under faults, and check all invariants."""
    calm, stormy = tmp_path / "calm", tmp_path / "stormy"
    training = small_training(steps, blocks=2, micro_batches=2, checkpoint=CHECKPOINT)
    calm.mkdir()
    stormy.mkdir()
    with supervised(calm, training, standbys=0) as run:
        assert run.wait_end(end_s)["outcome"] == "SUCCEEDED", run.story()
        undisturbed, samples = dict(run.digests), {s: row.samples for s, row in run.rows.items()}
    open_files = psutil.Process().num_fds()
    with supervised(stormy, training, standbys=1, config=PATIENT, **stormy_options) as run:
        storm = Storm(run, seed, faults, dict(kinds))
        storm.inject_all()
        assert run.wait_end(end_s)["outcome"] == "SUCCEEDED", run.story()
        print(storm.summary())
        storm.assert_all_injected()
        assert len(run.of(EventKind.INCIDENT_CLOSED)) >= faults // 4
        # The last state depends on every earlier step and sample.
        assert run.digests[steps] == undisturbed[steps], run.story()
        assert run.digests.items() <= undisturbed.items(), run.story()
        assert {step: row.samples for step, row in run.rows.items()}.items() <= samples.items()
        # Rows that only dead agents knew are not reported.
        assert len(run.rows) >= steps - faults // 2
        assert run.has_all_events()
        run.wait(lambda: not list(run.agents.root.glob("*/save-*.seg")), 10.0)
        root = run.agents.root
    assert not root.exists()
    _, alive = psutil.wait_procs(storm.processes, 10.0)
    assert alive == []
    gc.collect()
    assert psutil.Process().num_fds() <= open_files + faults // 2
