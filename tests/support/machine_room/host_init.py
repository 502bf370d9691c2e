"""The first process of a host in the machine room: makes the host's own folders, then reaps.

Runs as process 1 of new mount, PID, IPC and UTS namespaces, with the host's plan as JSON in its
argument. It ends, and the kernel ends every process of the host with it, when its standard input
closes: a killed test leaves no host behind. It uses the standard library only.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

OWN_FOLDERS = ("/tmp", "/var/tmp", "/home", "/mnt")
"""Empty folders in memory of each host, beside /dev/shm and /run; /etc is a layer of its own."""


def main() -> None:
    plan = json.loads(sys.argv[1])
    socket.sethostname(plan["name"])
    _mount("-t", "proc", "proc", "/proc")
    _own_settings(plan["hosts"])
    _mount("-o", "remount,ro,bind", "/")
    _mount("-t", "tmpfs", "-o", f"size={plan['shm_bytes']},mode=1777", "shm", "/dev/shm")
    for folder in OWN_FOLDERS:
        _mount("-t", "tmpfs", "-o", f"size={plan['disk_bytes']},mode=1777", "disk", folder)
    home = Path(plan["home"])
    home.mkdir(mode=0o700, parents=True)
    os.chdir(home)
    # The kernel reaps the children of a process that ignores this signal; of process 1, all
    # orphans become children.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    os.write(1, b"up\n")
    while os.read(0, 1):
        pass


def _own_settings(hosts: dict[str, str]) -> None:
    """An /etc whose changes the host alone sees: the names of the room, no name server."""
    _mount("-t", "tmpfs", "-o", "size=16m,mode=755", "run", "/run")
    layers = {name: f"/run/etc/{name}" for name in ("upperdir", "workdir")}
    for folder in layers.values():
        Path(folder).mkdir(parents=True)
    options = ",".join(f"{name}={folder}" for name, folder in layers.items())
    _mount("-t", "overlay", "-o", f"lowerdir=/etc,{options}", "etc", "/etc")
    lines = [f"{address} {name}" for name, address in hosts.items()]
    Path("/etc/hosts").write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
    # With no name server, the resolver asks this host itself, which refuses at once.
    servers = Path("/etc/resolv.conf")
    servers.unlink(missing_ok=True)
    servers.write_text("")


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)


if __name__ == "__main__":
    main()
