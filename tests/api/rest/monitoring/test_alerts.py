"""Every alert rule fires on its cause, and its runbook begins with a command that works then.

The cause is made in a control plane over an in-memory cluster; `/metrics`, before and after it,
goes through Prometheus' own rule engine. Its clock stands for the time that a cause lasts.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from tests.support.service.alert_rules import TARGET, Course, Scrape, check, input_series, minutes
from tests.support.service.fake_cluster import FakeSupervisor, row, three_nodes
from tests.support.service.live_server import SPEC, LiveServer, live_server
from tests.support.waiting import DEADLINE_S, eventually

from holdfast import Client
from holdfast.cli.main import run
from holdfast_service.job_model.supervisor_protocol import EventKind

ROOT = Path(__file__).parents[4]
RULES = ROOT / "deploy/prometheus/alerts.yaml"
RUNBOOKS = ROOT / "docs/runbooks.md"
RULE_BY_ALERT: dict[str, dict[str, Any]] = {
    rule["alert"]: rule
    for group in yaml.safe_load(RULES.read_text())["groups"]
    for rule in group["rules"]
}
SECTION = re.compile(r"^## (\w+)\n(.*?)(?=^## |\Z)", re.M | re.S)
COMMAND = re.compile(r"^```sh\n(.+)\n", re.M)
COMMAND_BY_ALERT = {
    name: COMMAND.search(text) for name, text in SECTION.findall(RUNBOOKS.read_text())
}
NOT_THERE = "promtool is not installed (Debian: prometheus)"


class Installation:
    """A server, its cluster, and what Prometheus sees of it."""

    def __init__(self, server: LiveServer, client: Client) -> None:
        self.server, self.cluster, self.client = server, server.cluster, client
        self.running = True

    def scrape(self) -> Scrape:
        if not self.running:
            return Scrape()
        answer = httpx.get(f"{self.server.address}/metrics", trust_env=False, timeout=DEADLINE_S)
        return Scrape.of(answer.text)

    def until(self, name: str, least: float = 1.0, **labels: str) -> None:
        """Wait until the series, summed over its other labels, has at least this value."""
        eventually(lambda: self.scrape().value(name, **labels) >= least, failure_message=name)

    def running_job(self, name: str = "victim") -> FakeSupervisor:
        job_id = self.client.submit({**SPEC, "name": name}).id
        supervisor = self.server.run_job(job_id, end=False)
        eventually(lambda: self.client.get(job_id).progress.step == 5)
        return supervisor

    def incidents(self, number: int, **fields: Any) -> None:
        """Open and close so many incidents of a running job."""
        supervisor = self.running_job()
        for index in range(1, number + 1):
            record = {"incident": index, "attempt": 1, "opened_at": time.time(), **fields}
            supervisor.emit(EventKind.INCIDENT_OPENED, **record)
            supervisor.emit(EventKind.INCIDENT_CLOSED, **record, closed_at=time.time())
        self.until("holdfast_incidents_total", number, cause=fields["cause"])


@dataclass(frozen=True)
class Cause:
    make: Callable[[Installation], None]
    labels: dict[str, str] = field(default_factory=dict)
    course: Course = field(default_factory=Course)
    shown: str = ""
    """What the first command prints, among other things."""
    code: int = 0
    """Its exit code."""
    settings: dict[str, Any] = field(default_factory=dict)


def _stop(here: Installation) -> None:
    here.server.stop()
    here.running = False


def _leave_the_cluster(here: Installation) -> None:
    here.cluster.unreachable = True


def _fail_a_job(here: Installation) -> None:
    here.running_job().end("FAILED", "too_many_failures")
    here.until("holdfast_job_transitions_total", to="FAILED")


def _leave_an_incident_open(here: Installation) -> None:
    here.running_job().emit(
        EventKind.INCIDENT_OPENED,
        incident=1,
        attempt=1,
        cause="remote_unavailable",
        opened_at=time.time(),
    )
    here.until("holdfast_open_incidents")


def _quarantine(here: Installation) -> None:
    here.until("holdfast_nodes", 3)
    lost = {"cause": "node_lost", "rank": 0, "ranks": [0, 1], "worker": None}
    here.incidents(3, cause="node_lost", lost=[{**lost, "agent": "n0", "attempt": 1}])
    here.until("holdfast_nodes", standing="quarantined")


def _train_no_further(here: Installation) -> None:
    here.running_job()


def _wait_for_data(here: Installation) -> None:
    supervisor = here.running_job()
    slow = replace(row(1, 6), step_time_s=600.0, loader_wait_s=300.0, fetch_wait_s=300.0)
    supervisor.rows.append(slow)
    here.until("holdfast_data_bound_jobs")


def _save_slowly(here: Installation) -> None:
    supervisor = here.running_job()
    ended_at = supervisor.rows[-1].at  # of the step that is saved
    supervisor.emit(
        EventKind.CHECKPOINT_SAVED,
        at=ended_at + 400.0,
        step=5,
        attempt=1,
        tier="remote",
        uri="/checkpoints/step-5",
        nbytes=1000,
        mesh={},
        metrics={},
    )
    here.until("holdfast_checkpoint_seconds_count", tier="remote", op="save")


def _queue(here: Installation) -> None:
    """The first job takes all nodes."""
    here.running_job("first")
    here.client.submit({**SPEC, "name": "second"})
    here.until("holdfast_waiting_jobs", resource="nodes")


def _ask_for_nodes(here: Installation) -> None:
    nodes = three_nodes()
    here.cluster.nodes = replace(nodes, nodes=nodes.nodes[:1], can_grow=True)
    here.client.submit({**SPEC, "name": "large"})


def _lack_nodes(here: Installation) -> None:
    _ask_for_nodes(here)
    here.until("holdfast_growth_asked_nodes", 2)


def _exceed_the_bounds(here: Installation) -> None:
    _ask_for_nodes(here)
    here.until("holdfast_growth_refused_jobs")


def _keep_an_ended_job(here: Installation) -> None:
    supervisor = here.running_job()
    here.cluster.sticky.add(supervisor.launch.job_id)
    supervisor.end()
    here.until("holdfast_unreleased_jobs")


def _handle_jobs_late(here: Installation) -> None:
    """A real overload takes minutes: the times are put into the server's own histogram."""
    for _ in range(100):
        here.server.store.reconcile_lag.add(8.0)


def _answer_with_errors(here: Installation) -> None:
    """The database is away for the queries of one route."""
    for _ in range(10):
        answer = httpx.get(
            f"{here.server.address}/api/v1/nodes", trust_env=False, timeout=DEADLINE_S
        )
        assert answer.status_code == 500


def _refuse_webhooks(here: Installation) -> None:
    """The test's server has no sender: as with one whose receiver accepts nothing."""
    here.running_job().end()
    here.until("holdfast_unsent_webhooks")


class FailingNodes:
    async def list(self) -> None:
        raise RuntimeError("the table is gone")


CAUSES = {
    "HoldfastDown": Cause(_stop, shown="no answer from"),
    "HoldfastNotReady": Cause(
        _leave_the_cluster, {"part": "cluster", **TARGET}, shown="no head answers", code=8
    ),
    "HoldfastJobsFail": Cause(_fail_a_job, {"reason": "too_many_failures"}, shown="victim"),
    "HoldfastManyIncidents": Cause(
        lambda here: here.incidents(1, cause="hang", decision="replace the worker"),
        {"cause": "hang"},
        Course(repeats=True),
        shown="node0",
    ),
    "HoldfastCorruption": Cause(
        lambda here: here.incidents(1, cause="corruption", decision="replace the node"),
        {"cause": "corruption"},
        shown="node0",
    ),
    "HoldfastIncidentOpen": Cause(_leave_an_incident_open, {"cause": "remote_unavailable"}),
    "HoldfastSlowRecovery": Cause(
        lambda here: here.incidents(1, cause="node_lost", phases_s={"total": 120.0}),
        shown="victim",
    ),
    "HoldfastManyResizes": Cause(
        lambda here: here.incidents(1, cause="resize", decision="grow to a larger mesh"),
        course=Course(repeats=True),
        shown="victim",
    ),
    "HoldfastLowGoodput": Cause(
        _train_no_further,
        course=Course(per_minute={"holdfast_cluster_seconds_total": 60.0}),
        shown="victim",
    ),
    "HoldfastSlowData": Cause(_wait_for_data, shown="victim"),
    "HoldfastSlowCheckpoints": Cause(_save_slowly, shown="victim"),
    "HoldfastLongQueue": Cause(
        _queue,
        {"resource": "nodes"},
        Course(per_minute={"holdfast_longest_wait_seconds": 60.0}),
        shown="second",
    ),
    "HoldfastNoGrowth": Cause(_lack_nodes, shown="large"),
    "HoldfastGrowthRefused": Cause(
        _exceed_the_bounds, shown="large", settings={"autoscale_nodes": 2}
    ),
    "HoldfastNodesSetAside": Cause(_quarantine, shown="quarantined"),
    "HoldfastNotReleased": Cause(_keep_an_ended_job, shown="victim"),
    "HoldfastLateReconciler": Cause(_handle_jobs_late, course=Course(repeats=True)),
    "HoldfastServerErrors": Cause(_answer_with_errors, course=Course(repeats=True)),
    "HoldfastWebhooksUnsent": Cause(_refuse_webhooks, shown="503"),
}


@contextmanager
def installed(alert: str, folder: Path, receiver: str) -> Iterator[Installation]:
    async def reach_the_cluster() -> None:
        await server.cluster.capacity()

    changes: dict[str, Any] = {"probes": {"cluster": reach_the_cluster}}
    if alert == "HoldfastServerErrors":
        changes["nodes"] = FailingNodes()
    settings = {"webhook_url": receiver, **CAUSES[alert].settings}
    with live_server(folder, settings, **changes) as server, Client(server.address) as client:
        yield Installation(server, client)


class Refusing(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.send_error(503)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture(scope="module")
def receiver() -> Iterator[str]:
    """A receiver of webhooks that accepts nothing."""
    server = HTTPServer(("127.0.0.1", 0), Refusing)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join(DEADLINE_S)
    server.server_close()


def promtool_is_there() -> bool:
    if shutil.which("promtool"):
        return True
    if os.environ.get("HOLDFAST_NO_SKIPS"):
        pytest.fail(NOT_THERE)
    return False


@pytest.mark.seconds
@pytest.mark.parametrize("alert", CAUSES)
def test_an_alert_fires_on_its_cause_and_the_first_command_of_its_runbook_works(
    alert: str,
    receiver: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if not promtool_is_there():
        pytest.skip(NOT_THERE)
    monkeypatch.setenv("HOLDFAST_CONFIG", str(tmp_path / "config.json"))
    monkeypatch.setenv("HOLDFAST_WEBHOOK_URL", receiver)
    cause, rule = CAUSES[alert], RULE_BY_ALERT[alert]
    with installed(alert, tmp_path / "server", receiver) as here:
        monkeypatch.setenv("HOLDFAST_ADDRESS", here.server.address)
        before = here.scrape()
        cause.make(here)
        after = here.scrape()
        code, printed = first_command(alert, capsys)
    assert (code, cause.shown in printed) == (cause.code, True), printed
    check(
        RULES,
        rule,
        input_series(before, after, rule["expr"], cause.course),
        cause.labels,
        tmp_path,
        fires_after_min=minutes(rule.get("for", "0m")) + (65 if cause.course.grows else 5),
    )


def first_command(alert: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit code and output."""
    found = COMMAND_BY_ALERT[alert]
    assert found, f"{alert} has no command"
    words = shlex.split(found[1])
    if words[0] == "holdfast":
        capsys.readouterr()
        code = run(words[1:])
        return code, "".join(capsys.readouterr())
    done = subprocess.run(
        ["sh", "-c", found[1]], capture_output=True, text=True, timeout=30, check=False
    )
    return done.returncode, done.stdout + done.stderr


def test_every_alert_has_a_cause_here_and_a_section_in_the_runbooks() -> None:
    assert sorted(CAUSES) == sorted(RULE_BY_ALERT) == sorted(COMMAND_BY_ALERT)
    for alert, rule in RULE_BY_ALERT.items():
        assert rule["annotations"]["runbook"] == f"docs/runbooks.md#{alert.lower()}"
