"""`node ls`, `describe`, `cordon`, `uncordon`: results on stdout, everything else on stderr."""

from __future__ import annotations

import time
from typing import Annotated

from cyclopts import App, Parameter
from rich.table import Table
from rich.text import Text

from holdfast.cli import output
from holdfast.cli.exit_codes import ExitCode
from holdfast.cli.jobs import SHORT_RETRY_S, Address, Json
from holdfast.client import Client
from holdfast_service.quarantine import Standing
from holdfast_service.views import NodeView

NodeName = Annotated[str, Parameter(help="Name of the node, or the beginning of it.")]

SHOWN = 16
"""Characters of a node's name in a table: enough of it for the other commands."""
STYLES = {Standing.CORDONED: "magenta", Standing.QUARANTINED: "red"}


def ls(*, json: Json = False, address: Address = None) -> ExitCode:
    """List the cluster's nodes, and which of them are set aside."""
    with Client(address, retry_s=SHORT_RETRY_S) as client:
        found = client.nodes()
    if json:
        for node in found:
            output.print_json(node)
        return ExitCode.OK
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("NODE", "HOST", "STATE", "CPUS", "GPUS", "JOBS", "INCIDENTS", "SEEN", "REASON"):
        table.add_column(heading, no_wrap=True)
    for node in found:
        table.add_row(
            node.id[:SHOWN],
            node.host,
            _state(node),
            f"{node.cpus:g}",
            f"{node.gpus:g}",
            str(len(node.jobs)),
            str(len(node.incidents)),
            "now" if node.there else output.ago(node.last_seen),
            Text(_reason(node)),
        )
    output.console().print(table)
    return ExitCode.OK


def describe(name: NodeName, /, *, json: Json = False, address: Address = None) -> ExitCode:
    """Show one node: its health, its incidents, the jobs on it."""
    with Client(address, retry_s=SHORT_RETRY_S) as client:
        node = client.node(name)
    if json:
        output.print_json(node)
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
    for one in node.incidents:
        when = output.ago(one.at)
        out.print(f"incident {one.incident} of job {one.job}: {one.cause}, {when}")
    return ExitCode.OK


def cordon(
    name: NodeName,
    /,
    *,
    reason: Annotated[str, Parameter(help="Why, for whoever finds it so.")],
    for_s: Annotated[
        float | None, Parameter(name="--for", help="Seconds; default: until it is uncordoned.")
    ] = None,
    json: Json = False,
    address: Address = None,
) -> ExitCode:
    """Let no new rank be seated on a node; ranks leave it where a standby is."""
    until = None if for_s is None else time.time() + for_s
    with Client(address, retry_s=SHORT_RETRY_S) as client:
        return _told(client.cordon(name, reason, until=until), json)


def uncordon(name: NodeName, /, *, json: Json = False, address: Address = None) -> ExitCode:
    """Take a node back into use, whoever had set it aside; again is the same."""
    with Client(address, retry_s=SHORT_RETRY_S) as client:
        return _told(client.uncordon(name), json)


def register(app: App) -> None:
    group = App(name="node", help="List nodes, set them aside, take them back.")
    for command in (ls, describe, cordon, uncordon):
        group.command(command)
    app.command(group)


def _told(node: NodeView, json: bool) -> ExitCode:
    if json:
        output.print_json(node)
    else:
        output.console().print(Text.assemble(f"{node.id[:SHOWN]} is ", _state(node)))
    return ExitCode.OK


def _state(node: NodeView) -> Text:
    return Text(node.state.value, style=STYLES.get(node.state, ""))


def _reason(node: NodeView) -> str:
    if node.state is Standing.READY:
        return ""
    left = "" if node.until is None else f" (for {output.seconds(node.until - time.time())} more)"
    return f"{node.reason or ''}{left}"
