"""`cluster`: Ray on this machine, as one node of a cluster of several machines.

What needs packages of the server is imported when a command is called.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from holdfast.cli.exit_codes import ExitCode
from holdfast.cli.printing import output
from holdfast.cli.printing.columns import Column
from holdfast_service import extras
from holdfast_service.wording import plural

if TYPE_CHECKING:
    from holdfast_service.host_cluster.endpoint import Endpoint
    from holdfast_service.host_cluster.head_probe import HeadAnswer
    from holdfast_service.host_cluster.node_record import HostNode, NodeFiles
    from holdfast_service.host_cluster.ray_command import NodeOptions

DATA_DIR_VARIABLE = "HOLDFAST_DATA_DIR"
COLUMNS = (
    Column("NODE"),
    Column("ADDRESS", least=9),
    Column("STATE"),
    Column("CPUS", right=True),
    Column("GPUS", right=True),
    Column("LABELS", least=6),
)

DataDir = Annotated[Path | None, Parameter(help="Folder of the node's files; default ~/.holdfast.")]
Json = Annotated[bool, Parameter(name="--json", negative="", help="JSON on stdout.")]


@Parameter(name="*")
@dataclass(frozen=True)
class MachineOptions:
    """What this machine offers, and where the others reach it."""

    node_address: Annotated[
        str | None, Parameter(help="Address of this machine for the others; default: found.")
    ] = None
    node_name: Annotated[str | None, Parameter(help="Default: the host name.")] = None
    cpus: Annotated[int | None, Parameter(help="CPUs for jobs; default: all.")] = None
    gpus: Annotated[int | None, Parameter(help="GPUs for jobs; default: all.")] = None
    no_training: Annotated[
        bool, Parameter(negative="", help="No CPUs and GPUs: for an API server, or a head alone.")
    ] = False
    label: Annotated[
        list[str] | None,
        Parameter(negative="", help="KEY=VALUE, such as holdfast.io/domain=rack-1; may repeat."),
    ] = None
    resource: Annotated[
        list[str] | None, Parameter(negative="", help="NAME=N, a further resource; may repeat.")
    ] = None
    node_manager_port: Annotated[int, Parameter(help="Of Ray's node manager.")] = 6380
    object_manager_port: Annotated[int, Parameter(help="Of Ray's object manager.")] = 6381
    worker_ports: Annotated[str, Parameter(help="FIRST-LAST, for Ray's workers.")] = "10002-19999"
    agent_ports: Annotated[
        str | None, Parameter(help="FIRST-LAST, for Holdfast's own connections; default: any.")
    ] = None
    tls_dir: Annotated[
        Path | None,
        Parameter(help="Folder with ca.crt, tls.crt, tls.key: TLS between nodes; default: none."),
    ] = None
    health_period_s: Annotated[
        float, Parameter(help="Interval and deadline of the head's checks of a node.")
    ] = 1.0
    health_failures: Annotated[
        int, Parameter(help="Failed checks in a row after which a node is dead.")
    ] = 5
    block: Annotated[
        bool, Parameter(negative="", help="Stay in the foreground until Ctrl-C: for systemd.")
    ] = False


MACHINE = MachineOptions()


def _reporting(command: Callable[..., ExitCode]) -> Callable[..., ExitCode]:
    """Print the room's own errors, as other commands print the server's."""

    @wraps(command)
    def called(*given: Any, **named: Any) -> ExitCode:
        extras.require_server()
        from holdfast_service.host_cluster.errors import HostClusterError

        try:
            return command(*given, **named)
        except HostClusterError as error:
            output.stderr().print(f"error (cluster): {error}")
            return ExitCode.SERVER

    return called


@_reporting
def up(
    *,
    head: Annotated[
        bool, Parameter(negative="", help="The machine is the head; always so.")
    ] = True,
    gcs_port: Annotated[int, Parameter(help="Port that the other machines join.")] = 6379,
    token_file: Annotated[
        Path | None, Parameter(help="The token of a former head; default: made once.")
    ] = None,
    redis_address: Annotated[
        str | None,
        Parameter(help="HOST:PORT of a Redis that keeps the head's state; rediss://...: with TLS."),
    ] = None,
    redis_password_file: Annotated[
        Path | None, Parameter(help="File with its password, mode 0600.")
    ] = None,
    tls: Annotated[
        bool,
        Parameter(
            negative="",
            help="TLS of Holdfast's own connections, not of Ray's; makes the certificates, once.",
        ),
    ] = False,
    machine: MachineOptions = MACHINE,
    data_dir: DataDir = None,
    json: Json = False,
) -> ExitCode:
    """Start a cluster with this machine as its head; print what to run on the others."""
    from holdfast_service.host_cluster import (
        node as nodes,
    )
    from holdfast_service.host_cluster import token_file as tokens
    from holdfast_service.host_cluster.node_record import node_files

    files = node_files(_folder(data_dir))
    password = "" if redis_password_file is None else tokens.read_token(redis_password_file)
    with files.changing():
        nodes.refuse_second_node(files)
        if tls and machine.tls_dir is None:
            files.certificates.make_once(datetime.now(UTC))
            machine = replace(machine, tls_dir=files.certificates.folder)
        options = replace(
            _options(machine, None, gcs_port), redis=redis_address, redis_password=password
        )
        nodes.refuse_unusable_certificates(options.tls_dir)
        _warn(nodes.rays_calls_in_the_clear(options.tls_dir, os.environ))
        nodes.refuse_used_ports(options)
        if token_file is None:
            token = tokens.read_or_make_token(files.token)
        else:
            token = tokens.read_token(token_file)
        starter = nodes.Starter(files, options, block=machine.block)
        with tokens.keeping_token(files.token, token):
            starter.start()
    _print_up(starter.node, options.tls_dir, json)
    return _hold(starter) if machine.block else ExitCode.OK


@_reporting
def join(
    address: Annotated[str, Parameter(name="HOST[:PORT]", help="The head, as `up` printed it.")],
    /,
    *,
    token_file: Annotated[Path, Parameter(help="A copy of the head's token file, mode 0600.")],
    machine: MachineOptions = MACHINE,
    data_dir: DataDir = None,
    json: Json = False,
) -> ExitCode:
    """Make this machine a node of the cluster of another machine."""
    from holdfast_service.host_cluster import (
        node as nodes,
    )
    from holdfast_service.host_cluster import token_file as tokens
    from holdfast_service.host_cluster.endpoint import parse_endpoint
    from holdfast_service.host_cluster.head_probe import ask_head
    from holdfast_service.host_cluster.node_record import node_files
    from holdfast_service.host_cluster.ray_command import GCS_PORT

    files = node_files(_folder(data_dir))
    with files.changing():
        nodes.refuse_second_node(files)
        endpoint = nodes.resolved(parse_endpoint(address, GCS_PORT))
        token = tokens.read_token(token_file)
        options = _options(machine, endpoint, endpoint.port)
        nodes.refuse_unusable_certificates(options.tls_dir)
        _warn(nodes.rays_calls_in_the_clear(options.tls_dir, os.environ))
        answer = ask_head(endpoint, token_file)
        nodes.refuse_other_versions(answer, endpoint)
        nodes.refuse_other_tls(answer, endpoint, options.tls_dir)
        _warn(nodes.other_build(answer, endpoint))
        nodes.refuse_used_ports(options)
        starter = nodes.Starter(files, options, block=machine.block)
        with tokens.keeping_token(files.token, token):
            answer = starter.start()
    _print_joined(starter.node, answer, json)
    return _hold(starter) if machine.block else ExitCode.OK


@_reporting
def certificate(
    *,
    days: Annotated[
        int | None, Parameter(help="How long it is valid; default: as long as its authority.")
    ] = None,
    data_dir: DataDir = None,
) -> ExitCode:
    """Make a new certificate of the authority that `up --tls` made; copy it to all machines."""
    from holdfast_service.host_cluster.certificates import DAYS
    from holdfast_service.host_cluster.errors import HostClusterError
    from holdfast_service.host_cluster.node_record import node_files

    if days is not None and not 1 <= days <= DAYS:
        raise HostClusterError(f"--days {days} is not within 1 and {DAYS}")
    files = node_files(_folder(data_dir))
    with files.changing():
        end = files.certificates.renew(datetime.now(UTC), days)
    output.progress(
        f"made a new certificate in {files.certificates.folder}, valid until {end:%Y-%m-%d %H:%M} "
        "UTC: copy tls.key, then tls.crt, into the folder of every other machine; new connections "
        "use them at once"
    )
    return ExitCode.OK


@_reporting
def leave(*, data_dir: DataDir = None) -> ExitCode:
    """End the node of this machine. Jobs that have ranks here continue on other nodes."""
    return _end(data_dir, head=False)


@_reporting
def down(*, data_dir: DataDir = None) -> ExitCode:
    """End the head, and with it the cluster; the token stays for the next `up`."""
    return _end(data_dir, head=True)


@_reporting
def status(*, data_dir: DataDir = None, json: Json = False) -> ExitCode:
    """Show the node of this machine, and all nodes of its cluster. Exit code 8: it does not run."""
    from holdfast_service.host_cluster import (
        node as nodes,
    )
    from holdfast_service.host_cluster.head_probe import ask_head

    files, node = _recorded(data_dir)
    running = nodes.is_running(node)
    answer = ask_head(nodes.head_of(node), files.token)
    if json:
        output.print_json(
            {
                "head": node.head,
                "cluster": node.gcs,
                "running": running,
                "nodes": [each.__dict__ for each in answer.nodes],
            }
        )
    else:
        role = "head" if node.head else "node"
        state = "runs" if running else "has ended"
        output.progress(f"the {role} of this machine {state}; cluster at {node.gcs}")
        _print_nodes(answer)
    return ExitCode.OK if running else ExitCode.SERVER


group = App(name="cluster")
for each in (up, join, certificate, leave, down, status):
    group.command(each)


def _folder(data_dir: Path | None) -> Path:
    named = os.environ.get(DATA_DIR_VARIABLE)
    return data_dir or (Path(named) if named else Path.home() / ".holdfast")


def _options(machine: MachineOptions, head: Endpoint | None, gcs_port: int) -> NodeOptions:
    from holdfast_service.host_cluster import node as nodes
    from holdfast_service.host_cluster import ray_command as ray
    from holdfast_service.host_cluster.head_probe import BUILD_LABEL, TLS_LABEL
    from holdfast_workers import build
    from holdfast_workers.memory.peer_tls import TLS_VARIABLE

    named = os.environ.get(TLS_VARIABLE)
    tls_dir = machine.tls_dir or (Path(named) if named else None)
    ports = ray.Ports(
        gcs=gcs_port,
        node_manager=machine.node_manager_port,
        object_manager=machine.object_manager_port,
        workers=ray.parse_port_range(machine.worker_ports),
        agents=ray.parse_port_range(machine.agent_ports) if machine.agent_ports else None,
    )
    ray.check_ports(ports)
    return ray.NodeOptions(
        name=machine.node_name or socket.gethostname(),
        address=machine.node_address or nodes.own_address(head.host if head else None),
        head=head,
        ports=ports,
        cpus=0 if machine.no_training else machine.cpus,
        gpus=0 if machine.no_training else machine.gpus,
        labels={
            **ray.parse_labels(machine.label or []),
            BUILD_LABEL: build.LOADED,
            TLS_LABEL: "on" if tls_dir else "off",
        },
        resources=ray.parse_resources(machine.resource or []),
        tls_dir=tls_dir.absolute() if tls_dir else None,
        health_period_s=machine.health_period_s,
        health_failures=machine.health_failures,
    )


def _recorded(data_dir: Path | None) -> tuple[NodeFiles, HostNode]:
    from holdfast_service.host_cluster.errors import HostClusterError
    from holdfast_service.host_cluster.node_record import node_files

    files = node_files(_folder(data_dir))
    node = files.read()
    if node is None:
        raise HostClusterError(
            "this machine is not part of a cluster: run `holdfast cluster up --head` or "
            "`holdfast cluster join HOST --token-file FILE`"
        )
    return files, node


def _end(data_dir: Path | None, *, head: bool) -> ExitCode:
    from holdfast_service.host_cluster import node as nodes
    from holdfast_service.host_cluster.errors import HostClusterError
    from holdfast_service.host_cluster.head_probe import ask_head

    files, node = _recorded(data_dir)
    if node.head != head:
        role, command = ("the head", "down") if node.head else ("not the head", "leave")
        raise HostClusterError(f"this machine is {role}: run `holdfast cluster {command}`")
    others: list[str] = []
    with files.changing():
        if head:
            try:
                answer = ask_head(nodes.head_of(node), files.token)
                found = {each.name for each in answer.nodes if each.alive and not each.head}
                others = sorted(found)
            except HostClusterError as error:
                output.progress(f"the other nodes are not known: {error}")
        nodes.end(files, node)
    output.progress(f"ended the {'head' if head else 'node'} of this machine")
    if others:
        output.progress(
            f"still running, and waiting for a head: {', '.join(others)}; to end them, run "
            "`holdfast cluster leave` on each"
        )
    return ExitCode.OK


def _warn(warning: str) -> None:
    if warning:
        output.stderr().print(f"warning (cluster): {warning}", markup=False)


def _hold(starter: Any) -> ExitCode:
    """Wait for SIGTERM or Ctrl-C, then end the node."""
    stopped: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _frame: stopped.append(received))
    failed = starter.hold(lambda: bool(stopped))
    if failed is None:
        return ExitCode.OK
    output.stderr().print(f"error (cluster): Ray ended with status {failed}:\n{starter.log_tail()}")
    return ExitCode.SERVER


def _print_up(node: HostNode, tls_dir: Path | None, json: bool) -> None:
    join_command = f"holdfast cluster join {node.gcs} --token-file {Path(node.token).name}"
    copied = node.token
    if tls_dir is not None:
        join_command += f" --tls-dir {tls_dir.name}"
        copied += f" and the folder {tls_dir}"
    serve_command = (
        f"holdfast serve --ray-address {node.gcs} --ray-token-file {node.token} "
        "--store-uri s3://BUCKET/PREFIX"
    )
    if json:
        output.print_json(
            {
                "cluster": node.gcs,
                "token_file": node.token,
                "tls_dir": str(tls_dir) if tls_dir else None,
                "join": join_command,
                "serve": serve_command,
            }
        )
        return
    out = output.console()
    out.print(f"this machine is the head of the cluster at {node.gcs}")
    out.print(f"copy {copied} to the other machines, mode 0600; there:")
    out.print(f"  {join_command}")
    out.print("on this machine:")
    out.print(f"  {serve_command}")


def _print_joined(node: HostNode, answer: HeadAnswer, json: bool) -> None:
    alive = sum(each.alive for each in answer.nodes)
    if json:
        output.print_json({"cluster": node.gcs, "node": node.name, "nodes": alive})
        return
    output.console().print(
        f"{node.name} is a node of the cluster at {node.gcs}, which has {plural(alive, 'node')}"
    )


def _print_nodes(answer: HeadAnswer) -> None:
    rows = [
        [
            each.name,
            each.address,
            ("head" if each.head else "ready") if each.alive else "dead",
            f"{each.cpus:g}",
            f"{each.gpus:g}",
            " ".join(f"{key}={value}" for key, value in sorted(each.labels.items())),
        ]
        for each in sorted(answer.nodes, key=lambda each: (not each.alive, each.name))
    ]
    output.table(COLUMNS, rows, whole=True)
