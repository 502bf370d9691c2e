from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from selectors import SelectorKey

import pytest
from tests.support.memory.shm import SECRET, AgentProcess
from tests.support.waiting import DEADLINE_S, eventually

from holdfast_workers.memory import wire
from holdfast_workers.memory.lifeline import SILENCE, Lifelines

TIMEOUT_S = 1.0


class LossRecorder:
    def __init__(self) -> None:
        self.lost: list[tuple[str, str]] = []
        self.at: list[float] = []

    def __call__(self, agent: str, reason: str) -> None:
        self.at.append(time.monotonic())
        self.lost.append((agent, reason))


@pytest.fixture
def losses() -> LossRecorder:
    return LossRecorder()


@pytest.fixture
def lifelines(losses: LossRecorder) -> Iterator[Lifelines]:
    watcher = Lifelines(SECRET, losses, TIMEOUT_S)
    yield watcher
    watcher.close()


@pytest.fixture
def broken() -> LossRecorder:
    return LossRecorder()


@pytest.fixture
def asking(losses: LossRecorder, broken: LossRecorder) -> Iterator[Lifelines]:
    """It never takes silence for a loss within the time of a test."""
    watcher = Lifelines(SECRET, losses, 3600.0, broken)
    yield watcher
    watcher.close()


@pytest.fixture
def agent(shm: Path) -> Iterator[Callable[[str], AgentProcess]]:
    agents: list[AgentProcess] = []

    def start(name: str) -> AgentProcess:
        agents.append(AgentProcess.start(shm / name, heartbeat_s=0.05))
        return agents[-1]

    yield start
    for process in agents:
        process.end()


def _live(lifelines: Lifelines) -> int:
    return sum(line.phase.name == "LIVE" for line in list(lifelines._lines.values()))


@pytest.mark.chaos
def test_a_killed_process_breaks_its_lifeline_without_a_silence(
    broken: LossRecorder, asking: Lifelines, agent: Callable[[str], AgentProcess]
) -> None:
    names = ["n0", "n1", "n2"]
    agents = {name: agent(name) for name in names}
    for name, process in agents.items():
        asking.watch(name, "127.0.0.1", process.port)
    eventually(lambda: _live(asking) == 3)
    for count, name in enumerate(names, 1):
        agents[name].process.kill()
        eventually(lambda count=count: len({of for of, _ in broken.lost}) == count)  # type: ignore[misc]
        assert name in {of for of, _ in broken.lost}


@pytest.mark.seconds
def test_silence_is_reported_after_the_timeout(
    losses: LossRecorder, lifelines: Lifelines, agent: Callable[[str], AgentProcess]
) -> None:
    process, other = agent("n0"), agent("n1")
    lifelines.watch("n0", "127.0.0.1", process.port)
    lifelines.watch("n1", "127.0.0.1", other.port)
    eventually(lambda: _live(lifelines) == 2)
    stopped = time.monotonic()
    os.kill(process.process.pid, signal.SIGSTOP)
    eventually(lambda: losses.lost)
    assert losses.lost[0][0] == "n0"
    assert "no heartbeat" in losses.lost[0][1]
    assert losses.at[0] - stopped > TIMEOUT_S * 0.5


@pytest.mark.seconds
def test_time_in_which_the_watcher_did_not_run_does_not_count_as_silence(
    losses: LossRecorder,
    lifelines: Lifelines,
    agent: Callable[[str], AgentProcess],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lifelines.watch("n0", "127.0.0.1", agent("n0").port)
    eventually(lambda: _live(lifelines) == 1)
    select = lifelines._selector.select
    starved, resumed = threading.Event(), threading.Event()

    def starve_once(timeout: float | None = None) -> list[tuple[SelectorKey, int]]:
        if not starved.is_set():
            starved.set()
            time.sleep(TIMEOUT_S * 1.5)
            return []
        resumed.set()  # the silence until now has been judged
        return select(timeout)

    monkeypatch.setattr(lifelines._selector, "select", starve_once)
    assert resumed.wait(DEADLINE_S)
    assert losses.lost == []


_WATCHER = """
import sys
from holdfast_workers.memory import wire
from holdfast_workers.memory.lifeline import SILENCE, Lifelines
from tests.support.memory.shm import SECRET
lines = Lifelines(SECRET, lambda agent, reason: print(agent, reason, flush=True), 1.0)
lines.watch("n0", "127.0.0.1", int(sys.argv[1]))
print("watching", flush=True)
sys.stdin.read()
"""


@pytest.mark.chaos
def test_an_agent_suspended_together_with_the_watcher_is_not_lost(
    agent: Callable[[str], AgentProcess],
) -> None:
    process = agent("n0")
    watcher = subprocess.Popen(
        [sys.executable, "-c", _WATCHER, str(process.port)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[3],
        env={**os.environ, "PYTHONPATH": os.pathsep.join((".", *sys.path))},
    )
    assert watcher.stdout is not None
    watcher.stdout.readline()
    time.sleep(TIMEOUT_S)
    for pid in (process.process.pid, watcher.pid):
        os.kill(pid, signal.SIGSTOP)
    time.sleep(TIMEOUT_S * 1.5)
    os.kill(watcher.pid, signal.SIGCONT)  # the first to resume has received nothing yet
    time.sleep(TIMEOUT_S * 0.3)
    os.kill(process.process.pid, signal.SIGCONT)
    time.sleep(TIMEOUT_S * 1.5)
    assert not select.select([watcher.stdout], [], [], 0)[0], watcher.stdout.readline()
    os.kill(process.process.pid, signal.SIGSTOP)
    assert "no heartbeat" in watcher.stdout.readline()
    watcher.kill()
    watcher.communicate()


@pytest.mark.seconds
def test_an_unreachable_or_mute_agent_is_lost(losses: LossRecorder, lifelines: Lifelines) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        lifelines.watch("mute", "127.0.0.1", mute.getsockname()[1])
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            lifelines.watch("closed", "127.0.0.1", closed.getsockname()[1])
            eventually(lambda: len(losses.lost) == 2)
    assert sorted(name for name, _reason in losses.lost) == ["closed", "mute"]
    assert all(reason.startswith(SILENCE) for _name, reason in losses.lost)


@pytest.mark.seconds
def test_a_wrong_secret_is_a_lost_lifeline(
    losses: LossRecorder, agent: Callable[[str], AgentProcess]
) -> None:
    process = agent("n0")
    impostor = Lifelines(b"a guess", losses, TIMEOUT_S)
    impostor.watch("n0", "127.0.0.1", process.port)
    eventually(lambda: losses.lost)
    assert "unauthorised" in losses.lost[0][1]
    impostor.close()


@pytest.mark.seconds
def test_a_released_agent_is_not_reported_and_a_lost_one_can_be_watched_again(
    losses: LossRecorder, lifelines: Lifelines, agent: Callable[[str], AgentProcess]
) -> None:
    first, second = agent("n0"), agent("n1")
    for name, process in (("n0", first), ("n1", second)):
        lifelines.watch(name, "127.0.0.1", process.port)
    eventually(lambda: _live(lifelines) == 2)
    lifelines.forget("n0")
    first.end()
    second.end()
    eventually(lambda: losses.lost)
    again = agent("n1")
    lifelines.watch("n1", "127.0.0.1", again.port)
    eventually(lambda: _live(lifelines) == 1)
    again.end()
    eventually(lambda: len(losses.lost) == 2)
    assert [name for name, _reason in losses.lost] == ["n1", "n1"]


@pytest.mark.seconds
def test_a_peer_that_greets_and_ends_each_connection_is_lost(
    losses: LossRecorder, lifelines: Lifelines
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as greeter:

        def greet() -> None:
            while True:
                try:
                    sock, _ = greeter.accept()
                except OSError:
                    return
                with sock:
                    sock.sendall(wire.GREETING + bytes(wire.NONCE_BYTES))

        threading.Thread(target=greet, daemon=True).start()
        lifelines.watch("n0", "127.0.0.1", greeter.getsockname()[1])
        eventually(lambda: losses.lost)
        greeter.shutdown(socket.SHUT_RDWR)


@pytest.mark.seconds
def test_a_network_error_does_not_shorten_the_timeout(
    losses: LossRecorder, lifelines: Lifelines
) -> None:
    began = time.monotonic()
    lifelines.watch("n0", "no such host.invalid", 1)
    eventually(lambda: losses.lost)
    assert losses.lost[0][1].startswith(SILENCE)
    assert losses.at[0] - began >= TIMEOUT_S


@pytest.mark.seconds
def test_a_faulty_callback_does_not_end_the_other_lifelines(
    agent: Callable[[str], AgentProcess],
) -> None:
    losses: list[str] = []

    def faulty(name: str, _reason: str) -> None:
        losses.append(name)
        raise RuntimeError("a bug in the callback")

    lifelines = Lifelines(SECRET, faulty, TIMEOUT_S)
    first, second = agent("n0"), agent("n1")
    lifelines.watch("n0", "127.0.0.1", first.port)
    lifelines.watch("n1", "127.0.0.1", second.port)
    eventually(lambda: _live(lifelines) == 2)
    first.end()
    eventually(lambda: losses == ["n0"])
    second.end()
    eventually(lambda: losses == ["n0", "n1"])
    lifelines.close()
