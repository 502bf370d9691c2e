"""The commands `node ls`, `describe`, `cordon` and `uncordon`."""

from __future__ import annotations

import time
from typing import Annotated

from cyclopts import App, Parameter
from rich.text import Text

from holdfast.cli.common import OPTIONS, Options, seconds
from holdfast.cli.exit_codes import ExitCode
from holdfast.cli.printing import output
from holdfast.cli.printing.columns import Column
from holdfast_service.policy.quarantine import NodeStanding
from holdfast_service.views.nodes import NodeView

NodeName = Annotated[str, Parameter(help="Name of the node, or the start of it.")]

COLUMNS = (
    Column("NODE"),
    Column("HOST", least=9),
    Column("STATE"),
    Column("ROLE", drop=2),
    Column("CPUS", right=True),
    Column("GPUS", right=True),
    Column("JOBS", right=True),
    Column("INCIDENTS", right=True, drop=1),
    Column("SEEN"),
    Column("REASON", least=6),
)
STYLES = {NodeStanding.CORDONED: "magenta", NodeStanding.QUARANTINED: "red"}


def ls(*, options: Options = OPTIONS) -> ExitCode:
    """List the cluster's nodes, with those that are cordoned or quarantined."""
    with options.connect() as client:
        found = client.nodes()
    if output.results(options, found):
        return ExitCode.OK
    if not found:
        output.progress("no node has been seen yet")
        return ExitCode.OK
    shorten = _whole_id if options.wide else output.NodeIdShortener(node.id for node in found)
    output.table(COLUMNS, [_row(node, shorten) for node in found], whole=options.wide)
    return ExitCode.OK


def describe(name: NodeName, /, *, options: Options = OPTIONS) -> ExitCode:
    """Show one node: its health, its incidents, the jobs on it."""
    with options.connect() as client:
        node = client.node(name)
    if output.result(options, node):
        return ExitCode.OK
    out = output.console()
    out.print(Text.assemble((node.id, "bold"), "  ", _state(node), f"  {_reason(node)}"))
    out.print(f"at {node.host}, {node.cpus:g} CPUs, {node.gpus:g} GPUs; ", end="")
    seen = "present" if node.there else f"seen {output.ago(node.last_seen)}"
    out.print(f"{seen}, first {output.ago(node.first_seen)}")
    if node.head:
        out.print("the head of the cluster runs here")
    for job in node.jobs:
        out.print(f"job: {job}")
    for job in node.standby_of:
        out.print(f"standby of job: {job}")
    for device, speed in node.memory_gb_per_s.items():
        out.print(f"memory of {device}: {speed:g} GB/s")
    for finding in node.findings:
        out.print(Text(f"{finding.level} ({finding.probe}): {finding.what}"))
    for incident in node.incidents:
        when = output.ago(incident.at)
        out.print(f"incident {incident.incident} of job {incident.job}: {incident.cause}, {when}")
    return ExitCode.OK


def cordon(
    name: NodeName,
    /,
    *,
    reason: Annotated[str, Parameter(help="The reason, shown to other users.")] = "by hand",
    for_: Annotated[
        str | None,
        Parameter(name="--for", help="7200, 30m, 2h, 1d; default: until it is uncordoned."),
    ] = None,
    options: Options = OPTIONS,
) -> ExitCode:
    """Place no new rank on a node; its ranks move if a standby is ready."""
    until = None if for_ is None else time.time() + seconds(for_)
    with options.connect() as client:
        return _print_state(client.cordon(name, reason, until=until), options)


def uncordon(name: NodeName, /, *, options: Options = OPTIONS) -> ExitCode:
    """End the cordon or quarantine of a node. Can be repeated."""
    with options.connect() as client:
        return _print_state(client.uncordon(name), options)


group = App(name="node")
for command in (ls, describe, cordon, uncordon):
    group.command(command)


def _print_state(node: NodeView, options: Options) -> ExitCode:
    if not output.result(options, node):
        shorten = output.NodeIdShortener([node.id])
        output.console().print(Text.assemble(f"{shorten(node.id)} is ", _state(node)))
    return ExitCode.OK


def _whole_id(node_id: str) -> str:
    return node_id


def _row(node: NodeView, shorten: output.Shortener) -> list[str | Text]:
    return [
        shorten(node.id),
        node.host,
        _state(node),
        _role(node),
        f"{node.cpus:g}",
        f"{node.gpus:g}",
        str(len(node.jobs)),
        str(len(node.incidents)),
        "now" if node.there else output.age(node.last_seen) + " ago",
        _reason(node),
    ]


def _state(node: NodeView) -> Text:
    return Text(node.state.value, style=STYLES.get(node.state, ""))


def _role(node: NodeView) -> str:
    """What it does beside running ranks."""
    standby = "standby" if node.standby_of and not node.jobs else ""
    return ", ".join(filter(None, ("head" if node.head else "", standby)))


def _reason(node: NodeView) -> str:
    if node.state is NodeStanding.READY:
        return ""
    left = "" if node.until is None else f" (for {output.seconds(node.until - time.time())} more)"
    return f"{node.reason or ''}{left}"
