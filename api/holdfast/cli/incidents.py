"""`incidents`: lists the faults of a job and the decisions about them, or shows one in full."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter
from rich.text import Text

from holdfast.cli.common import OPTIONS, JobWord, NotUnderstood, Options
from holdfast.cli.exit_codes import ExitCode
from holdfast.cli.printing import output
from holdfast.cli.printing.columns import Column
from holdfast.cli.printing.describe import INCIDENT_INDENT, incident_lines
from holdfast_service.views.incident_text import ranks_of
from holdfast_service.views.incidents import IncidentView
from holdfast_service.wording import duration, ranks_text

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
    number: Annotated[
        int | None, Parameter(name="NUMBER", help="Show only this one, in full.")
    ] = None,
    /,
    *,
    alternatives: Annotated[
        bool, Parameter(negative="", help="With NUMBER: list the refused alternatives, too.")
    ] = False,
    options: Options = OPTIONS,
) -> ExitCode:
    """List a job's incidents: the losses, the decision and the duration of each."""
    with options.connect() as client:
        job_id = client.find(job_word)
        found = client.incidents(job_id)
    if number is not None:
        found = [incident for incident in found if incident.number == number]
        if not found:
            raise NotUnderstood(f"the job has no incident {number}")
    if output.results(options, found):
        return ExitCode.OK
    if not found:
        output.progress("no incidents")
    elif number is not None:
        (short_id,) = output.ids([job_id])
        for line in incident_lines(found[0], job=short_id, alternatives=alternatives):
            output.console().print(output.fold(line, INCIDENT_INDENT))
    else:
        output.table(COLUMNS, [_row(incident) for incident in found], whole=options.wide)
    return ExitCode.OK


def _row(incident: IncidentView) -> list[str | Text]:
    total_s = incident.phases_s.get("total")
    took = "" if total_s is None else duration(total_s)
    over = incident.closed_at is not None
    return [
        str(incident.number),
        output.clock(incident.opened_at),
        Text(incident.cause, style="" if over else "yellow"),
        _lost_ranks(incident),
        incident.decision or "-",
        "-" if incident.steps_lost is None else str(incident.steps_lost),
        took or ("-" if over else "open"),
    ]


def _lost_ranks(incident: IncidentView) -> str:
    """`rank 3`, or `ranks 0 to 3`."""
    ranks = {rank for item in incident.lost for rank in ranks_of(item)}
    return ranks_text(ranks) if ranks else "-"
