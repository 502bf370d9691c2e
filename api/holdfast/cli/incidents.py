"""`incidents`: every fault of a job and what was done about it; one of them in full."""

from __future__ import annotations

from typing import Annotated, Any

from cyclopts import Parameter
from rich.text import Text

from holdfast.cli import output
from holdfast.cli.columns import Column
from holdfast.cli.common import OPTIONS, JobWord, NotUnderstood, Options
from holdfast.cli.describe import incident_lines
from holdfast.cli.exit_codes import ExitCode
from holdfast_service.views.jobs import IncidentView

COLUMNS = (
    Column("#", right=True),
    Column("AT"),
    Column("CAUSE", least=10),
    Column("LOST", least=8, drop=2),
    Column("DECISION", least=10),
    Column("STEPS LOST", right=True, drop=1),
    Column("TOOK", right=True),
)


def incidents(
    job_word: JobWord,
    number: Annotated[int | None, Parameter(name="NUMBER", help="This one, in full.")] = None,
    /,
    *,
    options: Options = OPTIONS,
) -> ExitCode:
    """List a job's incidents: what was lost, what was decided, how long it took."""
    with options.connect() as client:
        found = client.incidents(client.find(job_word))
    if number is not None:
        found = [item for item in found if item.number == number]
        if not found:
            raise NotUnderstood(f"the job has no incident {number}")
    if output.results(options, found):
        return ExitCode.OK
    if not found:
        output.talk("no incidents")
    elif number is not None:
        for line in incident_lines(found[0]):
            output.console().print(output.fold(line, 14))
    else:
        output.table(COLUMNS, [_row(entry) for entry in found], whole=options.wide)
    return ExitCode.OK


def _row(incident: IncidentView) -> list[str | Text]:
    total_s = incident.phases_s.get("total")
    took = "" if total_s is None else _duration(total_s)
    over = incident.closed_at is not None
    return [
        str(incident.number),
        output.clock(incident.opened_at),
        Text(incident.cause, style="" if over else "yellow"),
        _lost(incident.lost),
        incident.decision or "-",
        "-" if incident.steps_lost is None else str(incident.steps_lost),
        took or ("-" if over else "open"),
    ]


def _lost(lost: tuple[Any, ...]) -> str:
    """`rank 3`, or `ranks 0-3`."""
    ranks = list[int]()
    for item in lost:
        if isinstance(item, dict):
            given = item.get("ranks") or ([item["rank"]] if item.get("rank") is not None else [])
            ranks += [int(rank) for rank in given]
    if not ranks:
        return "-"
    return ("rank " if len(ranks) == 1 else "ranks ") + ",".join(map(str, sorted(set(ranks))))


def _duration(value_s: float) -> str:
    return f"{value_s * 1000:.0f} ms" if value_s < 1 else output.seconds(value_s)
