"""One host of the machine room: its processes, its files and its power."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

HOME = "/home/trainer"
BOOT_S = 60.0
END_S = 60.0
INIT = Path(__file__).with_name("host_init.py")


class HostFault(Exception):
    """A command on a host failed, ran too long, or the host did not start; with its output."""


@dataclass(frozen=True)
class HostPlan:
    """What a host has. Sizes of its /dev/shm, and of each of its other folders, in bytes."""

    name: str
    address: str
    hosts: Mapping[str, str]  # the addresses of all hosts by name, for its /etc/hosts
    shm_bytes: int
    disk_bytes: int


class HostProcess:
    """A process on a host; its output is in the file `log`, outside the host."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self._process = process
        self.log = log

    @property
    def status(self) -> int | None:
        """Its exit status; None while it runs."""
        return self._process.poll()

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process itself, which nsenter started."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self._process.pid).children():
                child.send_signal(number)

    def wait(self, within_s: float) -> int:
        """Its exit status. Raises HostFault after `within_s`."""
        try:
            return self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            raise HostFault(f"it still runs after {within_s} s:\n{self.output()}") from None

    def end(self, within_s: float = END_S) -> int:
        """SIGTERM, and SIGKILL after `within_s`; returns the exit status."""
        self.signal(signal.SIGTERM)
        try:
            return self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            self.signal(signal.SIGKILL)
            return self._process.wait(END_S)


class Host:
    """A booted host. `inside`: the prefix of a command in its network namespace. `logs`: a folder
    outside the host for the output of its processes."""

    def __init__(
        self, plan: HostPlan, inside: Sequence[str], environment: Mapping[str, str], logs: Path
    ) -> None:
        self.name = plan.name
        self.address = plan.address
        self._environment = {**environment, "HOME": HOME, "HOSTNAME": plan.name}
        self._logs = logs
        self._started: list[HostProcess] = []
        self.init = 0  # the pid of the host's first process, as this process numbers it
        fields = {**plan.__dict__, "hosts": dict(plan.hosts), "home": HOME}
        namespaces = ("--mount", "--propagation", "private", "--pid", "--ipc", "--uts")
        self._outer = subprocess.Popen(
            [
                *(*inside, "unshare", *namespaces, "--fork", "--kill-child"),
                *(sys.executable, "-I", "-S", str(INIT), json.dumps(fields)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        try:
            self.init = self._await_boot()
        except BaseException:
            self.kill()
            raise

    def run(
        self, command: str | Sequence[str], *, timeout_s: float = 60.0, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run a command (a string: by a shell) to its end. Raises HostFault if it fails, unless
        `check` is false, or after `timeout_s`."""
        process = self.start(command)
        try:
            status = process.wait(timeout_s)
        except HostFault as fault:
            process.end(0.5)
            raise HostFault(f"{self.name}: {command!r}: {fault}") from None
        self._started.remove(process)
        if check and status:
            raise HostFault(f"{self.name}: {command!r} ended with {status}:\n{process.output()}")
        return subprocess.CompletedProcess(command, status, process.output())

    def start(self, command: str | Sequence[str], **variables: str) -> HostProcess:
        """Start a command in the host's home; it ends with the host at the latest."""
        words = ["sh", "-c", command] if isinstance(command, str) else [*command]
        self._logs.mkdir(parents=True, exist_ok=True)
        log = self._logs / f"{self.name}-{len(list(self._logs.iterdir())):03}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*self._entered(), "--", *words],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**self._environment, **variables},
            )
        started = HostProcess(process, log)
        self._started.append(started)
        return started

    def read(self, path: str) -> str:
        """The text of a file of the host."""
        return self.outside(path).read_text()

    def write(self, path: str, text: str, mode: int = 0o600) -> None:
        """A file of the host, as a user would copy it there."""
        file = self.outside(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        file.chmod(mode)

    def outside(self, path: str) -> Path:
        """Where this process finds a path of the host, while the host lives."""
        return Path(f"/proc/{self.init}/root", path.removeprefix("/"))

    def pids(self) -> list[int]:
        """All processes of the host except its first, as this process numbers them."""
        own = _namespace(self.init)
        others = (pid for pid in psutil.pids() if pid != self.init)
        return [pid for pid in others if _namespace(pid) == own]

    def kill(self) -> None:
        """End every process of the host at once; its memory and its folders are gone."""
        if self.init:
            with contextlib.suppress(ProcessLookupError):
                # The kernel ends the others before this one is reaped.
                os.kill(self.init, signal.SIGKILL)
        else:
            self._outer.kill()
        self._outer.wait(END_S)
        for stream in (self._outer.stdin, self._outer.stdout, self._outer.stderr):
            if stream is not None:
                stream.close()
        for process in self._started:
            process.wait(END_S)
        self._started.clear()

    def _await_boot(self) -> int:
        """The pid of the host's first process. Raises HostFault."""
        assert self._outer.stdout is not None
        assert self._outer.stderr is not None
        ready, _, _ = select.select([self._outer.stdout], [], [], BOOT_S)
        if not ready or os.read(self._outer.stdout.fileno(), 3) != b"up\n":
            self._outer.kill()
            raise HostFault(f"{self.name} did not boot: {self._outer.stderr.read().decode()}")
        deadline = time.monotonic() + BOOT_S
        while not (children := psutil.Process(self._outer.pid).children()):
            if time.monotonic() > deadline:
                raise HostFault(f"{self.name} has no first process")
        return children[0].pid

    def _entered(self) -> list[str]:
        namespaces = ("--mount", "--pid", "--ipc", "--uts", "--net")
        return ["nsenter", "--target", str(self.init), *namespaces, f"--wdns={HOME}"]


def _namespace(pid: int) -> str | None:
    """The PID namespace of a process; None if it has ended."""
    try:
        return str(Path(f"/proc/{pid}/ns/pid").readlink())
    except OSError:
        return None
