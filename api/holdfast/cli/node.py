"""`node ls`, `describe`, `cordon`, `uncordon`: results on stdout, everything else on stderr."""

from __future__ import annotations

import time
from typing import Annotated

from cyclopts import App, Parameter
from rich.text import Text

from holdfast.cli import output
from holdfast.cli.columns import Column
from holdfast.cli.common import OPTIONS, Options, seconds
from holdfast.cli.exit_codes import ExitCode
from holdfast_service.policy.quarantine import NodeStanding
from holdfast_service.views.jobs import NodeView

NodeName = Annotated[str, Parameter(help="Name of the node, or the beginning of it.")]

SHOWN = 16
"""Characters of a node's name in a table: enough of it for the other commands."""
COLUMNS = (
    Column("NODE"),
    Column("HOST", least=9),
    Column("STATE"),
    Column("CPUS", right=True),
    Column("GPUS", right=True),
    Column("JOBS", right=True),
    Column("INCIDENTS", right=True, drop=1),
    Column("SEEN"),
    Column("REASON", least=6),
)
STYLES = {NodeStanding.CORDONED: "magenta", NodeStanding.QUARANTINED: "red"}


def ls(*, options: Options = OPTIONS) -> ExitCode:
    """List the cluster's nodes, and which of them are set aside."""
    with options.connect() as client:
        found = client.nodes()
    if output.results(options, found):
        return ExitCode.OK
    if not found:
        output.talk("no node was seen yet")
        return ExitCode.OK
    output.table(COLUMNS, [_row(node, options.wide) for node in found], whole=options.wide)
    return ExitCode.OK


def describe(name: NodeName, /, *, options: Options = OPTIONS) -> ExitCode:
    """Show one node: its health, its incidents, the jobs on it."""
    with options.connect() as client:
        node = client.node(name)
    if output.results(options, [node]):
        return ExitCode.OK
    out = output.console()
    out.print(Text.assemble((node.id, "bold"), "  ", _state(node), f"  {_reason(node)}"))
    out.print(f"at {node.host}, {node.cpus:g} CPUs, {node.gpus:g} GPUs; ", end="")
    seen = "there now" if node.there else f"seen {output.ago(node.last_seen)}"
    out.print(f"{seen}, first {output.ago(node.first_seen)}")
    for job in node.jobs:
        out.print(f"job: {job}")
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
    reason: Annotated[str, Parameter(help="Why, for whoever finds it so.")] = "by hand",
    for_: Annotated[
        str | None,
        Parameter(name="--for", help="7200, 30m, 2h, 1d; default: until it is uncordoned."),
    ] = None,
    options: Options = OPTIONS,
) -> ExitCode:
    """Let no new rank be seated on a node; ranks leave it where a standby is."""
    until = None if for_ is None else time.time() + seconds(for_)
    with options.connect() as client:
        return _told(client.cordon(name, reason, until=until), options)


def uncordon(name: NodeName, /, *, options: Options = OPTIONS) -> ExitCode:
    """Take a node back into use, whoever had set it aside; again is the same."""
    with options.connect() as client:
        return _told(client.uncordon(name), options)


group = App(name="node")
for command in (ls, describe, cordon, uncordon):
    group.command(command)


def _told(node: NodeView, options: Options) -> ExitCode:
    if not output.results(options, [node]):
        output.console().print(Text.assemble(f"{node.id[:SHOWN]} is ", _state(node)))
    return ExitCode.OK


def _row(node: NodeView, whole: bool) -> list[str | Text]:
    return [
        node.id if whole else node.id[:SHOWN],
        node.host,
        _state(node),
        f"{node.cpus:g}",
        f"{node.gpus:g}",
        str(len(node.jobs)),
        str(len(node.incidents)),
        "now" if node.there else output.age(node.last_seen) + " ago",
        _reason(node),
    ]


def _state(node: NodeView) -> Text:
    return Text(node.state.value, style=STYLES.get(node.state, ""))


def _reason(node: NodeView) -> str:
    if node.state is NodeStanding.READY:
        return ""
    left = "" if node.until is None else f" (for {output.seconds(node.until - time.time())} more)"
    return f"{node.reason or ''}{left}"
