"""A machine room in a box: several hosts on this machine, each a machine of its own.

A host has its own network, mount, PID, IPC and UTS namespaces: its own /tmp, /home, /run and
/dev/shm (of a small size), hostname, address and processes. The rest of the file system, with the
interpreter and the code, is common and read-only. One link per host leads to a bridge. Needs root,
`ip` and `unshare`.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.support.machine_room.host import Host, HostPlan
from tests.support.nodes import namespaces

MIB = 2**20
SHM_BYTES = 128 * MIB
DISK_BYTES = 2048 * MIB
ROOT = Path(__file__).parents[3]
PACKAGES = ("workers", "service", "api", ".")


class MachineRoom:
    """Boots a host for each name. `shm_bytes`: sizes of /dev/shm that are not the default.
    `variables`: further environment variables of every process."""

    def __init__(
        self,
        names: list[str],
        logs: Path,
        *,
        shm_bytes: Mapping[str, int] | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.names = tuple(names)
        self._logs = logs
        self._shm_bytes = shm_bytes or {}
        self._bridge = namespaces.Bridge(names)
        self._environment = {**_environment(), **(variables or {})}
        self._hosts: dict[str, Host] = {}

    def __enter__(self) -> MachineRoom:
        self._bridge.__enter__()
        try:
            for name in self.names:
                self.boot(name)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getitem__(self, name: str) -> Host:
        return self._hosts[name]

    def address(self, name: str) -> str:
        return self._bridge.address(name)

    def boot(self, name: str) -> Host:
        """Start the host; it has empty folders, as a machine that was replaced."""
        hosts = {each: self.address(each) for each in self.names}
        plan = HostPlan(
            name=name,
            address=hosts[name],
            hosts=hosts,
            shm_bytes=self._shm_bytes.get(name, SHM_BYTES),
            disk_bytes=DISK_BYTES,
        )
        self._bridge.link(name, up=True)
        self._bridge.route(name)
        self._hosts[name] = Host(plan, self._bridge.inside(name), self._environment, self._logs)
        return self._hosts[name]

    def power_off(self, name: str) -> None:
        """Cut the host's power: its link goes first, so that no peer is told."""
        self._bridge.link(name, up=False)
        self._hosts.pop(name).kill()

    def link(self, name: str, *, up: bool) -> None:
        """Cut or restore the only link of the host."""
        self._bridge.link(name, up=up)
        if up:
            self._bridge.route(name)

    def close(self) -> None:
        """End all hosts; leaves no process, namespace or link."""
        with contextlib.ExitStack() as ending:
            ending.callback(self._bridge.close)
            for host in self._hosts.values():
                ending.callback(host.kill)
            self._hosts = {}


def _environment() -> dict[str, str]:
    """Of every process on a host: its programs are those of this interpreter."""
    programs = Path(sys.executable).parent
    return {
        "PATH": os.pathsep.join([str(programs), os.environ.get("PATH", os.defpath)]),
        "PYTHONPATH": os.pathsep.join(str(ROOT / package) for package in PACKAGES),
        "PYTHONDONTWRITEBYTECODE": "1",
        "LANG": "C.UTF-8",
        "RAY_USAGE_STATS_ENABLED": "0",
        "OMP_NUM_THREADS": "1",
    }
