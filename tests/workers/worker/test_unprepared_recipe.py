"""A worker whose recipe could not be prepared, as its data is away."""

from __future__ import annotations

import os
from pathlib import Path

from tests.support.nodes.agent_config import agent_config, join_order

from holdfast_workers.data.corpus import CorpusError, DataUnavailable
from holdfast_workers.ipc import control_channel
from holdfast_workers.progress import beacon as beacons
from holdfast_workers.progress.beacon import Beacon, BeaconReader
from holdfast_workers.protocol.messages import ErrorKind
from holdfast_workers.protocol.processes import JoinAttempt, WorkerSignal
from holdfast_workers.protocol.signals import WorkerFailed
from holdfast_workers.recipes import pretrain
from holdfast_workers.spec import TrainingSpec
from holdfast_workers.worker.main import Worker

WAIT_S = 60.0
ERRORS = (DataUnavailable("no manifest"), DataUnavailable("again"), CorpusError("it does not fit"))


class UnpreparedRecipe(pretrain.PretrainRecipe):
    """Its data fails as `errors` say, one for each attempt."""

    def __init__(self, spec: TrainingSpec, cache_dir: Path) -> None:
        super().__init__(spec, cache_dir)
        self.errors = list(ERRORS)

    def prepare(self) -> None:
        """Fails with what its beacon shows meanwhile."""
        error = self.errors.pop(0)
        beacon = beacons.current()
        assert beacon is not None
        shown = BeaconReader(beacon.path).read()
        assert shown is not None
        where = f"in {shown.phase} of attempt {shown.attempt}, bound {shown.bound_s:g} s"
        raise type(error)(f"{error} {where}")


def test_an_attempt_whose_data_is_away_fails_for_that_and_the_next_one_looks_again(
    tmp_path: Path,
) -> None:
    config = agent_config(tmp_path).zygote_config
    ours, theirs = control_channel.pair()
    ours.settimeout(WAIT_S)
    path = beacons.path_of(tmp_path, "n0.abc.1")
    beacons.create(path)
    recipe = UnpreparedRecipe(config.plan.spec, tmp_path)
    pid = os.fork()
    if pid == 0:
        ours.close()
        os._exit(Worker(theirs, config, recipe, Beacon(path), None, is_prepared=False).run())
    theirs.close()
    found = []
    for attempt in (1, 2, 3):
        order = join_order(tmp_path / "segment", attempt=attempt)
        control_channel.send(ours, JoinAttempt(order))
        signal = control_channel.receive(ours, WorkerSignal)
        assert isinstance(signal.detail, WorkerFailed)
        error = signal.detail.error
        found.append((error.kind, error.type, error.message))
    ours.close()
    os.waitpid(pid, 0)
    assert found == [
        (ErrorKind.DATA, "DataUnavailable", "no manifest in data of attempt 1, bound 1200 s"),
        (ErrorKind.DATA, "DataUnavailable", "again in data of attempt 2, bound 1200 s"),
        (ErrorKind.USER, "CorpusError", "it does not fit in data of attempt 3, bound 1200 s"),
    ]
