"""Starts, watches and ends the node of this machine."""

from __future__ import annotations

import contextlib
import os
import platform
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import psutil

from holdfast_service.embedded_cluster import processes
from holdfast_service.host_cluster.endpoint import Endpoint, parse_endpoint
from holdfast_service.host_cluster.errors import HostClusterError
from holdfast_service.host_cluster.head_probe import HeadAnswer, ask_head
from holdfast_service.host_cluster.node_record import HostNode, NodeFiles
from holdfast_service.host_cluster.ray_command import (
    GCS_PORT,
    NodeOptions,
    arguments,
    passed_on,
    variables,
)
from holdfast_workers import build
from holdfast_workers.ipc import environment
from holdfast_workers.memory.peer_tls import TLS_VARIABLE, PeerTls, TlsUnusable

ASIDE = "192.0.2.1"  # an address of no machine (RFC 5737); nothing is sent to it
_RAYS_PROGRAMS = ("raylet", "gcs_server")  # as they end: the first says good-bye to the second
_START_S = 120.0
_END_S = 5.0
"""The limit of the orderly end of one program of Ray; one takes longer only if its head is away."""
_POLL_S = 0.1
_LOG_LINES = 15


def own_address(towards: str | None) -> str:
    """The address by which this machine reaches another one, or the rest of its network. Raises
    HostClusterError."""
    with contextlib.suppress(OSError):
        found = socket.getaddrinfo(towards or ASIDE, GCS_PORT, type=socket.SOCK_DGRAM)[0]
        with socket.socket(found[0], socket.SOCK_DGRAM) as probe:
            probe.connect(found[4])
            address = str(probe.getsockname()[0])
        if not address.startswith("127.") and address != "::1":
            return address
    raise HostClusterError(
        "this machine has no address that others can reach"
        f"{f' on the way to {towards}' if towards else ''}: name one by --node-address"
    )


def resolved(head: Endpoint) -> Endpoint:
    """The endpoint with the head's numeric address, which Ray needs. Raises HostClusterError."""
    try:
        found = socket.getaddrinfo(head.host, head.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise HostClusterError(
            f"{head.host} is not a known machine ({error.strerror}): write its address"
        ) from error
    found.sort(key=lambda each: each[0] != socket.AF_INET)
    return replace(head, host=str(found[0][4][0]))


def refuse_second_node(files: NodeFiles) -> None:
    """Raises HostClusterError if this machine is part of a cluster. Clears the remains of a node
    whose processes have ended."""
    node = files.read()
    if node is None:
        return
    if is_running(node):
        role = "is the head of" if node.head else "is part of"
        command = "down" if node.head else "leave"
        raise HostClusterError(
            f"this machine {role} the cluster at {node.gcs}: run `holdfast cluster {command}` first"
        )
    processes.sweep(node.mark, [node.temp_dir, node.shm_root])
    files.record.unlink()


def refuse_used_ports(options: NodeOptions) -> None:
    """Raises HostClusterError if another program listens on one of the node's fixed ports."""
    ports = {"--node-manager-port": options.ports.node_manager}
    ports["--object-manager-port"] = options.ports.object_manager
    if options.head is None:
        ports["--gcs-port"] = options.ports.gcs
    family = socket.AF_INET6 if ":" in options.address else socket.AF_INET
    for option, port in ports.items():
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((options.address, port))
                probe.listen()
            except OSError as error:
                raise HostClusterError(
                    f"cannot listen on {options.address} port {port} ({error.strerror}): end the "
                    f"program that uses it (another Ray?), or choose another {option}"
                ) from error


def refuse_other_versions(answer: HeadAnswer, head: Endpoint) -> None:
    """Raises HostClusterError unless the head has this machine's Ray and Python."""
    from importlib.metadata import version  # late: it is slow

    for program, theirs, ours in (
        ("Ray", answer.ray, version("ray")),
        ("Python", answer.python, platform.python_version()),
    ):
        if theirs != ours:
            raise HostClusterError(
                f"the head at {head} has {program} {theirs}, this machine has {ours}: install "
                f"{program} {theirs} here, or the same version on all machines"
            )


def other_build(answer: HeadAnswer, head: Endpoint) -> str:
    """A warning if the head was started by another build of Holdfast; "" if not, or unknown."""
    theirs = next((node.build for node in answer.nodes if node.alive and node.head), "")
    if theirs in ("", build.LOADED):
        return ""
    return (
        f"the head at {head} was started by build {theirs} of Holdfast, this machine has "
        f"{build.LOADED}: no job uses machines of different builds. Install the version of the "
        "machine that runs `holdfast serve` on all machines, then leave and join again"
    )


def refuse_other_tls(answer: HeadAnswer, head: Endpoint, tls_dir: Path | None) -> None:
    """Raises HostClusterError if only one of head and this machine uses TLS between nodes."""
    theirs = next((node.tls for node in answer.nodes if node.alive and node.head), "")
    if theirs == "on" and tls_dir is None:
        raise HostClusterError(
            f"the head at {head} uses TLS between nodes: copy its folder of certificates, which "
            "`holdfast cluster up --tls` named there, to this machine, and name the copy by "
            "--tls-dir"
        )
    if theirs == "off" and tls_dir is not None:
        raise HostClusterError(
            f"the head at {head} does not use TLS between nodes: leave out --tls-dir "
            f"({TLS_VARIABLE}), or start all machines anew with TLS, the head first"
        )


def rays_calls_in_the_clear(tls_dir: Path | None, machine: Mapping[str, str]) -> str:
    """A warning if the node uses TLS, but Ray's processes, which have settings of their own and
    compare names in certificates, do not; "" otherwise."""
    if tls_dir is None or machine.get("RAY_USE_TLS", "").lower() in ("1", "true"):
        return ""
    return (
        "TLS is on for Holdfast's own connections (states of ranks, lifelines), but not for Ray's: "
        "calls between its processes, with code and keys of jobs and the cluster's token in them, "
        "can be listened to. Let nobody else reach this network, or set RAY_USE_TLS and RAY_TLS_* "
        "on all machines and start them anew: see TLS in docs/deploy.md"
    )


def refuse_unusable_certificates(tls_dir: Path | None) -> None:
    """Raises HostClusterError."""
    if tls_dir is None:
        return
    try:
        PeerTls(tls_dir).check()
    except TlsUnusable as error:
        raise HostClusterError(str(error)) from error


class Starter:
    """Starts the node; with `block`, the process stays its owner (`hold`)."""

    def __init__(self, files: NodeFiles, options: NodeOptions, *, block: bool) -> None:
        self._files = files
        self._options = options
        self._block = block
        mark = secrets.token_hex(4)
        short = Path("/tmp") if os.access("/tmp", os.W_OK) else Path(tempfile.gettempdir())
        self.node = HostNode(
            mark=mark,
            head=options.head is None,
            gcs=str(options.gcs),
            name=options.name,
            address=options.address,
            temp_dir=str(short / f"holdfast-{mark}"),  # short: the paths of sockets are limited
            shm_root=f"/dev/shm/holdfast-{mark}",
            token=str(files.token),
            holder=os.getpid() if block else 0,
            started_at=time.time(),
        )
        self._program: subprocess.Popen[bytes]

    def start(self) -> HeadAnswer:
        """Returns the head's answer once the node is in the cluster. Raises HostClusterError; then
        nothing is left."""
        node = self.node
        self._files.write(node)  # first, so that a crash at any moment can be cleaned up
        try:
            for made in node.places.made:
                made.mkdir(mode=0o700)
            self._run_ray_start()
            return self._await_member()
        except BaseException:
            end_processes(node, 0.0)
            self._files.record.unlink(missing_ok=True)
            raise

    def hold(self, stopped: Callable[[], bool]) -> int | None:
        """Wait until `stopped()`, then None; or until a process of Ray ends: `ray start`'s status.
        Ends the node in both cases."""
        try:
            while not stopped():
                if (status := self._program.poll()) is not None:
                    return status
                time.sleep(_POLL_S)
            return None
        finally:
            end_processes(self.node, _END_S)
            self._files.record.unlink(missing_ok=True)

    def log_tail(self) -> str:
        lines = self._files.log.read_text(errors="replace").splitlines()
        return "\n".join(lines[-_LOG_LINES:])

    def _run_ray_start(self) -> None:
        places = self.node.places
        program = [sys.executable, "-m", "ray.scripts.scripts", "start"]
        with self._files.log.open("w") as log:
            self._program = subprocess.Popen(
                [*program, *arguments(self._options, places, block=self._block)],
                env={
                    **environment.for_nodes(os.environ),
                    **passed_on(self._options, os.environ),
                    **variables(self._options, places),
                },
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C in this terminal must not reach the node
            )

    def _await_member(self) -> HeadAnswer:
        deadline = time.monotonic() + _START_S
        why = ""
        while time.monotonic() < deadline:
            status = self._program.poll()
            if status or (status is not None and self._block):
                raise HostClusterError(
                    f"`ray start` ended with status {status}; the end of its output "
                    f"({self._files.log}):\n{self.log_tail()}"
                )
            if status is None and not self._block:
                time.sleep(_POLL_S)
                continue
            try:
                answer = ask_head(self._options.gcs, self._files.token)
                if any(each.alive and each.address == self.node.address for each in answer.nodes):
                    return answer
                why = "the head does not list this node"
            except HostClusterError as error:
                why = str(error)
            time.sleep(_POLL_S)
        raise HostClusterError(
            f"the node did not start within {_START_S:.0f} s ({why}); the end of "
            f"the output of `ray start`:\n{self.log_tail()}"
        )


def end(files: NodeFiles, node: HostNode) -> None:
    """End the node of this machine, with its `--block` process if it has one, and remove its
    folders. The token stays. Raises HostClusterError if something of it is left."""
    if node.holder and _is_holder(node):
        with contextlib.suppress(ProcessLookupError):
            os.kill(node.holder, signal.SIGTERM)
        deadline = time.monotonic() + 2 * _END_S
        while _is_holder(node) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
    end_processes(node, _END_S)
    if left := processes.of_cluster(node.mark):
        raise HostClusterError(
            f"processes of the node are left: {', '.join(map(str, left))}: they may belong to "
            "another user; run the command as that user"
        )
    files.record.unlink(missing_ok=True)


def end_processes(node: HostNode, end_s: float) -> None:
    """End the node's processes: Ray's own first, so that they sign off from the cluster, then all
    others."""
    for program in _RAYS_PROGRAMS if end_s > 0 else ():
        ending = [pid for pid in processes.of_cluster(node.mark) if _name(pid) == program]
        for pid in ending:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + end_s
        while any(map(_lives, ending)) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
    with contextlib.suppress(PermissionError):
        processes.sweep(node.mark, [node.temp_dir, node.shm_root])


def is_running(node: HostNode) -> bool:
    """Whether a process of Ray of this node lives."""
    return any(_name(pid) in _RAYS_PROGRAMS for pid in processes.of_cluster(node.mark))


def head_of(node: HostNode) -> Endpoint:
    return parse_endpoint(node.gcs, GCS_PORT)


def _is_holder(node: HostNode) -> bool:
    """Whether the holder's pid is still that process: it started before the node did."""
    try:
        process = psutil.Process(node.holder)
        return process.create_time() <= node.started_at and _lives(node.holder)
    except psutil.Error:
        return False


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _name(pid: int) -> str:
    try:
        process = psutil.Process(pid)
        return "" if process.status() == psutil.STATUS_ZOMBIE else process.name()
    except psutil.Error:
        return ""
