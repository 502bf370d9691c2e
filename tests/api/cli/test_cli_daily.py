"""The everyday commands: find jobs by name, show, watch, configure, complete."""

from __future__ import annotations

import ast
import io
import json
import os
import re
import signal
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from subprocess import PIPE
from typing import cast

import httpx
import pytest
import yaml
from rich.text import Text
from tests.support.service.fake_cluster import line
from tests.support.service.live_server import SPEC, LiveServer
from tests.support.waiting import DEADLINE_S, eventually

from holdfast import Client
from holdfast.cli import completion, own_servers
from holdfast.cli.common import ServerOptions
from holdfast.cli.exit_codes import ExitCode
from holdfast.cli.main import COMMANDS, run
from holdfast.cli.printing.columns import Column, lay
from holdfast.client import config
from holdfast.errors import ServerUnreachable
from holdfast.schemas import SERVER_FILE, ServerFile
from holdfast_service.diagnosis.node_faults import InspectedNode
from holdfast_service.job_model.capacity import NodeCapacity
from holdfast_service.job_model.lifecycle import State
from holdfast_workers.health.node_facts import measure
from holdfast_workers.memory import node_folder
from holdfast_workers.memory.node_folder import NodeFolder

HEAVY = "ray torch numpy fastapi starlette uvicorn sqlalchemy structlog asyncio click pygments"

UNUSED_BY_HELP = (
    f"{HEAVY} pydantic httpx yaml pygments markdown_it holdfast.client.synchronous.request_methods "
    "holdfast_service.views.view holdfast_service.job_model.supervisor_protocol holdfast_workers"
)
NEEDED_FOR_THE_MAIN_HELP = {
    "holdfast",
    "holdfast.cli",
    "holdfast.cli.main",
    "holdfast.cli.exit_codes",
    "holdfast.errors",
    "holdfast_service",
    "holdfast_service.errors",
    "holdfast_service.job_model",
    "holdfast_service.job_model.lifecycle",
}
MAX_MODULES = 300
"""The modules that the help of a command may load, including those of the interpreter, rich and
cyclopts (about 180): the help must appear in 0.3 s, and an import takes half a millisecond or
more."""
LIGHT = ("ls", "wait", "pause", "resume", "cancel", "describe")


@pytest.fixture(autouse=True)
def at_server(server: LiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_ADDRESS", server.address)
    monkeypatch.setenv("HOLDFAST_CONFIG", str(tmp_path / "config.json"))


def output_of(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    assert run(list(arguments)) == code, capsys.readouterr().err
    return capsys.readouterr().out


def started(server: LiveServer, client: Client, name: str, steps: int = 4) -> str:
    job_id = client.submit({**SPEC, "name": name}).id
    server.run_job(job_id, steps=steps, end=False)
    eventually(lambda: client.get(job_id).progress.step == steps)
    return job_id


def test_a_command_loads_only_what_it_needs(server: LiveServer) -> None:
    program = (
        "import sys, holdfast.cli.main as m; sys.argv = ['holdfast', *sys.argv[1:]]\n"
        "try: m.main()\n"
        f"finally: print([n for n in {HEAVY!r}.split() if n in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program, "ls"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == "[]"


def test_the_help_of_all_commands_loads_none_of_them() -> None:
    program = (
        "import sys, holdfast.cli.main as m; sys.argv = ['holdfast', '--help']\n"
        "try: m.main()\n"
        "finally: print([n for n in sys.modules if n.startswith('holdfast')], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert set(ast.literal_eval(done.stderr.splitlines()[-1])) <= NEEDED_FOR_THE_MAIN_HELP


def test_the_help_of_a_command_loads_no_client() -> None:
    program = (
        "import sys, holdfast.cli.main as m\n"
        "for name in sys.argv[1:]: m.run([name, '--help'])\n"
        f"print([n for n in {UNUSED_BY_HELP!r}.split() if n in sys.modules], file=sys.stderr)\n"
        "print(len(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *LIGHT], capture_output=True, text=True, check=True
    )
    heavy, count = done.stderr.splitlines()[-2:]
    assert heavy == "[]"
    assert int(count) <= MAX_MODULES


def test_listing_jobs_as_json_takes_few_requests(
    server: LiveServer, client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = [client.submit({**SPEC, "name": f"n{n}"}).id for n in range(5)]

    def requests() -> float:
        text = httpx.get(f"{server.address}/metrics", trust_env=False, timeout=DEADLINE_S).text
        counters = [x for x in text.splitlines() if x.startswith("holdfast_http_requests_total{")]
        return sum(float(x.split()[-1]) for x in counters if "/api/v1/jobs" in x)

    before = requests()
    shown = json.loads(output_of(capsys, "ls", "--json"))
    assert [job["id"] for job in shown] == ids[::-1]
    assert [job["name"] for job in shown] == [f"n{n}" for n in range(5)][::-1]
    assert requests() - before == 1


@pytest.mark.seconds
def test_a_job_is_found_by_its_name_and_by_the_start_or_end_of_its_id(
    server: LiveServer, client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    first = started(server, client, "one")
    second, third = client.submit({**SPEC, "name": "twin"}), client.submit({**SPEC, "name": "twin"})
    assert {client.find(word) for word in ("one", first, first[:18], first[-8:])} == {first}
    assert client.jobs.get("one").id == first
    assert json.loads(output_of(capsys, "pause", "one", "--json"))["id"] == first
    assert run(["describe", "twin"]) == ExitCode.USAGE
    refused = capsys.readouterr().err
    assert "ambiguous_name" in refused
    for job in (second, third):
        (shown,) = [text for text in refused.splitlines() if job.id[-8:] in text]
        assert client.find(shown.split()[0]) == job.id, "the printed id is sufficient"
    assert run(["describe", "0"]) == ExitCode.USAGE, "all ids start like this"
    assert run(["describe", "nobody"]) == ExitCode.NOT_FOUND


def test_dry_run_creates_no_job_and_submit_suggests_next_commands(
    client: Client, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def given(*arguments: str, code: int = 0) -> tuple[str, str]:
        stdin = io.TextIOWrapper(io.BytesIO(yaml.safe_dump(SPEC).encode()))
        monkeypatch.setattr(sys, "stdin", stdin)
        assert run(["submit", *arguments]) == code
        out, err = capsys.readouterr()
        return out, err

    resolved, printed = given("-f", "-", "--dry-run", "--set", "train.steps=9")
    assert re.search(r"each node needs at least .+ of /dev/shm, .+ of memory and \d+ proc", printed)
    assert yaml.safe_load(resolved)["train"]["steps"] == 9
    assert "parallel.tp" in given("-", "--dry-run", "--set", "parallel.tp=3", code=2)[1]
    assert list(client.list()) == []
    job_id, suggestions = given("-")
    assert client.get(job_id.strip()).state is State.QUEUED
    assert "holdfast cancel" in suggestions
    assert "name one file" in given("--dryrun", code=2)[1]
    assert yaml.safe_load(given("-f", "-", "-o", "yaml")[0])["name"] == "tiny"


def test_dry_run_lists_the_meshes_of_an_elastic_job_and_what_was_refused(
    client: Client, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    elastic = {
        "name": "elastic",
        "parallel": {"dp_shard": "auto"},
        "resources": {"nodes": {"min": 1, "max": 3}},
        "train": {"global_batch": 8, "micro_batch": 4},
    }
    stdin = io.TextIOWrapper(io.BytesIO(yaml.safe_dump(elastic).encode()))
    monkeypatch.setattr(sys, "stdin", stdin)
    assert run(["submit", "-", "--dry-run"]) == 0
    out, err = capsys.readouterr()
    assert yaml.safe_load(out)["resources"]["nodes"]["max"] == 2
    shown = [line.strip() for line in err.splitlines()]
    assert shown[0] == "meshes, best first:"
    assert shown[1].startswith("dp_shard 2 × tp 1: 2 ranks on 2 nodes, ")
    assert shown[1].endswith(
        "; place 1 by throughput: 1 pass per step (2 micro-batches dealt to 2), 100% of the "
        "fastest; modelled, not measured"
    )
    assert "MB per rank (modelled)" in shown[2]
    assert "not on 3 nodes: 3 ranks share only 2 micro-batches" in shown
    validated = client.validated(elastic)
    assert validated.spec == client.validate(elastic)
    assert validated.meshes is not None
    assert [found.nodes for found in validated.meshes.legal] == [2, 1]
    assert [refused.nodes for refused in validated.meshes.refused] == [3]
    assert client.validated(SPEC).meshes is None


@pytest.mark.seconds
def test_logs_events_and_metrics_are_listed_filtered_and_plotted(
    server: LiveServer, client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    job_id = started(server, client, "watched")
    supervisor = server.supervisor(job_id)
    supervisor.logs += [line(1, "loss is 3"), line(2, "ERROR: gone", rank=1)]
    eventually(lambda: len(client.logs(job_id).items) == 2)
    assert "gone" in output_of(capsys, "logs", "watched", "--grep", "g.ne")
    assert "loss" not in output_of(capsys, "logs", "watched", "--grep", "g.ne")
    assert output_of(capsys, "logs", "watched", "--since", "2099-01-01") == ""
    assert run(["logs", "watched", "--grep", "("]) == ExitCode.USAGE
    capsys.readouterr()
    kinds = output_of(capsys, "events", "watched", "--kind", "^job.submitted")
    assert kinds.count("\n") == 1
    numbers = [
        event["seq"] for event in json.loads(output_of(capsys, "events", "watched", "--json"))
    ]
    assert numbers == list(range(1, len(numbers) + 1))
    drawn = output_of(capsys, "metrics", "watched", "loss")
    assert "loss  now 1.5" in drawn
    assert any(0x2800 < ord(dot) < 0x2900 for dot in drawn)
    points = output_of(capsys, "metrics", "watched", "loss", "-o", "jsonl").splitlines()
    assert [json.loads(text)["step"] for text in points] == [1, 2, 3, 4]
    assert "watched" in output_of(capsys, "top", "--once")
    assert "step 4 of 5" in output_of(capsys, "top", "watched")
    assert "Traceback" not in output_of(capsys, "describe", "watched")
    assert run(["incidents", "watched"]) == 0
    assert run(["checkpoints", "watched"]) == 0
    assert "no incidents" in capsys.readouterr().err
    head = NodeCapacity("head-of-it", "127.0.0.9", cpus=0.0, gpus=0.0, head=True)
    server.cluster.nodes = replace(server.cluster.nodes, nodes=(head, *server.cluster.nodes.nodes))
    eventually(lambda: any(node.head for node in client.nodes()))
    nodes = [output_of(capsys, *words) for words in (("nodes",), ("node", "ls"))]
    assert nodes[0].split()[:10] == nodes[1].split()[:10]
    roles = {line.split()[0]: line.split()[3] for line in nodes[0].splitlines()}
    assert (roles["head-of-it"], roles["node2"]) == ("head", "standby")
    assert f"standby of job: {job_id}" in output_of(capsys, "node", "describe", "node2")


def test_a_table_fits_the_terminal_and_is_whole_in_a_pipe(
    client: Client, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = client.submit({**SPEC, "name": "a-name-that-is-much-longer-than-any-column-can-be"})
    whole = output_of(capsys, "ls")
    assert job.id in whole
    assert job.name in whole
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    fitted = Text.from_ansi(output_of(capsys, "ls")).plain
    assert max(map(len, fitted.splitlines())) <= 80
    assert job.id[-8:] in fitted
    assert "…" in fitted


def test_columns_are_cut_and_dropped_in_a_narrow_terminal() -> None:
    columns = (Column("A"), Column("B", least=4), Column("C", right=True, drop=1))
    rows: list[list[str | Text]] = [["x" * 5, Text("y" * 10), "1"]]
    assert lay(columns, rows, None).plain.split("\n")[1] == "xxxxx  yyyyyyyyyy  1"
    assert lay(columns, rows, 17).plain.split("\n")[1] == "xxxxx  yyyyyy…  1"
    assert lay(columns, rows, 12).plain.split("\n")[1] == "xxxxx  yyyy…"


def test_login_stores_a_server_for_its_owner_only(
    server: LiveServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HOLDFAST_ADDRESS")
    token = "t0ps3cret-0123456789"

    def login(name: str) -> int:
        monkeypatch.setattr("sys.stdin", io.StringIO(f"{token}\n"))
        return run(["login", server.address, "--name", name, "--token", "-"])

    assert run(["login", server.address, "--name", "lab", "--token", token]) == ExitCode.USAGE
    assert token not in capsys.readouterr().err, "each user of the machine sees arguments"
    assert login("lab") == 0
    assert stat.S_IMODE(config.path().stat().st_mode) == 0o600
    shown = {
        setting["setting"]: setting for setting in json.loads(output_of(capsys, "config", "--json"))
    }
    assert shown["address"]["value"] == server.address
    assert shown["address"]["from"] == "context lab"
    assert token not in json.dumps(shown)
    with Client() as client, Client("http://127.0.0.1:1") as elsewhere:
        found = client.server.find_credential()
        assert found is not None and (found.token, found.uid) == (token, os.getuid())
        sent_elsewhere = elsewhere.server.find_credential()
        assert sent_elsewhere is None, "a token is sent to its own server only"
    assert run(["login", server.address, "--token", "--name", "x"]) == ExitCode.USAGE
    assert config.load().contexts["lab"].token == token
    assert run(["login", "127.0.0.1:1", "--no-check"]) == 0
    assert json.loads(output_of(capsys, "ls", "--context", "lab", "--json")) == []
    assert run(["config", "use", "nope"]) == ExitCode.USAGE
    assert run(["config", "rm", "127.0.0.1"]) == 0
    assert config.load().current is None
    assert run(["login", "127.0.0.1:1"]) == ExitCode.UNREACHABLE
    config.path().write_text("{")
    assert run(["ls"]) == ExitCode.USAGE


def test_completion_offers_commands_options_and_active_jobs(
    server: LiveServer, client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    def offered(*words: str) -> list[str]:
        return [
            text.split("\t")[0] for text in output_of(capsys, "_candidates", *words).splitlines()
        ]

    started(server, client, "alive")
    assert offered("") == [command.name for command in COMMANDS]
    assert offered("des") == ["describe"]
    assert offered("logs", "") == ["alive"]
    assert offered("logs", "-f", "al") == ["alive"]
    assert "--grep" in offered("logs", "alive", "--g")
    assert offered("logs", "--level", "w") == ["warning"]
    assert offered("checkpoint", "ver") == ["verify"]
    assert offered("checkpoint", "verify", "") == ["alive"]
    assert offered("logs", "--rank", "") == []
    server.stop()
    assert offered("logs", "") == []


@pytest.mark.parametrize("shell", sorted(completion.SCRIPTS))
def test_a_completion_script_is_valid_in_its_shell(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    script = output_of(capsys, "completion", shell)
    try:
        done = subprocess.run([shell, "-n"], input=script, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip(f"{shell} is not installed")
    assert done.returncode == 0, done.stderr


def test_a_completion_candidate_is_never_executed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trap = tmp_path / "sprung"
    script = (
        f"holdfast() {{ printf '%s\\t\\n' 'a$(touch {trap})' 'able' 'baker'; }}\n"
        f"{output_of(capsys, 'completion', 'bash')}\n"
        "COMP_WORDS=(holdfast logs a) COMP_CWORD=2\n_holdfast\nprintf '%s\\n' \"${COMPREPLY[@]}\""
    )
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert done.stdout.splitlines() == [f"a$(touch {trap})", "able"], done.stderr
    assert not trap.exists()


def test_ctrl_c_ends_the_display_and_not_the_job(
    server: LiveServer, client: Client, tmp_path: Path
) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump({**SPEC, "name": "left"}))
    following = subprocess.Popen(
        [sys.executable, "-m", "holdfast", "submit", str(path), "--follow"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert following.stdout is not None
    assert "left" in following.stdout.readline()
    following.send_signal(signal.SIGINT)
    _, notice = following.communicate(timeout=DEADLINE_S)
    assert following.returncode == ExitCode.INTERRUPTED
    assert "holdfast cancel" in notice
    (job,) = client.list()
    assert not job.state.terminal


def test_doctor_gives_advice(
    server: LiveServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(["doctor", "--json", "--data-dir", str(tmp_path)])
    found = {result["what"]: result for result in json.loads(capsys.readouterr().out)}
    assert found["server"]["grade"] == "good"
    assert {"machine", "memory", "disk", "gpu", "ray", "port", "packages"} <= set(found)
    server.stop()
    run(["doctor", "--data-dir", str(tmp_path)])
    assert "holdfast serve" in capsys.readouterr().out


def test_doctor_finds_a_server_with_another_data_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_ADDRESS", "http://127.0.0.1:1")
    (tmp_path / "holdfast.db").touch()
    waits = "import sys; kept = open(sys.argv[2]); print('open', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", waits, "serve", str(tmp_path / "holdfast.db")]
    with subprocess.Popen(command, stdin=PIPE, stdout=PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "open\n"
        other = holder.pid + 1  # no server's
        for pid, is_named in ((holder.pid, True), (other, False)):
            server = ServerFile(address="http://127.0.0.1:2", pid=pid, data_dir=str(tmp_path))
            (tmp_path / SERVER_FILE).write_text(server.model_dump_json())
            run(["doctor"])
            shown = " ".join(capsys.readouterr().out.split())
            advice = f"http://127.0.0.1:2, with data in {tmp_path} → for its jobs: export"
            assert (advice in shown) is is_named
            lines = "\n".join(own_servers.others_lines())
            choice = f"unset HOLDFAST_ADDRESS; export HOLDFAST_DATA_DIR={tmp_path}"
            assert (choice in lines) is is_named
        (tmp_path / SERVER_FILE).unlink()
        os.mkfifo(tmp_path / SERVER_FILE)  # of another user, in a folder that many write to
        assert list(own_servers.others_lines()) == [], "and it is not waited for"
        (tmp_path / SERVER_FILE).unlink()
        forged = ServerFile(address="http://10.0.0.9:2", pid=holder.pid, data_dir="/elsewhere")
        (tmp_path / SERVER_FILE).write_text(forged.model_dump_json())
        assert list(own_servers.others_lines()) == []
        holder.communicate("")


def test_a_command_without_a_server_names_those_that_it_does_not_find(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> Client:
        raise ServerUnreachable("no Holdfast server answers")

    server = ServerFile(address="http://127.0.0.1:2", pid=1, data_dir="/a folder/of a run")
    monkeypatch.setattr(ServerOptions, "connect", refuse)
    monkeypatch.setattr(own_servers, "own_servers", lambda: [server])
    monkeypatch.delenv("HOLDFAST_ADDRESS", raising=False)
    assert run(["ls"]) == ExitCode.UNREACHABLE
    *_, names, choice = capsys.readouterr().err.splitlines()
    assert "runs at http://127.0.0.1:2" in names
    assert choice == "  export HOLDFAST_DATA_DIR='/a folder/of a run'"


def test_doctor_names_the_faults_of_every_node(
    server: LiveServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = measure(tmp_path, tmp_path)
    server.cluster.inspected = [
        InspectedNode("n1", "10.0.0.1", facts),
        InspectedNode("n2", "10.0.0.2", facts, unreachable={"n1": "timed out"}),
    ]
    assert run(["doctor", "--cluster"]) == ExitCode.SERVER
    printed = " ".join(capsys.readouterr().out.split())
    assert "BAD 10.0.0.2 network cannot connect to 10.0.0.1: timed out → open all ports" in printed
    server.cluster.inspected.pop()
    assert run(["doctor", "--cluster", "--json"]) == ExitCode.OK
    assert "10.0.0.1" in {result["what"] for result in json.loads(capsys.readouterr().out)}
    server.cluster.unreachable = True
    assert run(["doctor", "--cluster"]) == ExitCode.SERVER
    assert "the cluster does not answer" in capsys.readouterr().out


def test_doctor_frees_the_memory_of_nodes_that_are_gone(
    shm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(node_folder.BASE_VARIABLE, str(shm))
    with subprocess.Popen(["sleep", "600"]) as node:
        former = NodeFolder(shm / "ended" / "n0-a", shm, node.pid)
        former.take()
        (shm / "ended" / "n0-a" / "own-0.seg").write_bytes(bytes(1 << 20))
        node.kill()
    os.close(cast(int, former._lock))  # its agent has ended too
    living = NodeFolder(shm / "job" / "n0-b", shm, os.getpid())
    living.take()
    run(["doctor", "--data-dir", str(tmp_path)])
    assert "holdfast doctor --clean" in capsys.readouterr().out
    run(["doctor", "--clean", "--data-dir", str(tmp_path)])
    printed = capsys.readouterr()
    assert "n0-a" in printed.err and "--clean" not in printed.out
    assert [path.name for path in shm.iterdir()] == ["job"]
    living.remove()
