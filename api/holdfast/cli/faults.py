"""`inject`: break something of a running job on purpose."""

from __future__ import annotations

import math
from typing import Annotated, Any

from cyclopts import Parameter

from holdfast.cli import output
from holdfast.cli.common import OPTIONS, JobWord, NotUnderstood, Options, seconds
from holdfast.cli.exit_codes import ExitCode
from holdfast.client import fault_storm
from holdfast_service.views.jobs import FaultView
from holdfast_workers.fault_injection.kinds import FaultKind


def inject(
    job_word: JobWord,
    kind: Annotated[FaultKind, Parameter(help="What is to happen; the table is in operations.md.")],
    /,
    *others: Annotated[FaultKind, Parameter(help="More kinds, for a storm.")],
    rank: Annotated[int | None, Parameter(help="Whom it meets; default: a random rank.")] = None,
    at_step: Annotated[int | None, Parameter(help="When it gets to this step.")] = None,
    phase: Annotated[str | None, Parameter(help="In this phase of a step or recovery.")] = None,
    duration: Annotated[str | None, Parameter(help="How long it lasts: 500ms, 20s, 5m.")] = None,
    set_: Annotated[
        list[str] | None,
        Parameter(name="--set", negative="", help="What else the kind takes: factor=3, where=..."),
    ] = None,
    storm: Annotated[
        str | None, Parameter(help="mtbf=20s: again and again, on random ranks.")
    ] = None,
    seed: Annotated[int, Parameter(help="Of the storm.")] = 0,
    for_: Annotated[str, Parameter(name="--for", help="How long it storms.")] = "5m",
    options: Options = OPTIONS,
) -> ExitCode:
    """Inject a fault into a running job. The server must allow it: serve --allow-fault-injection.

    A storm lasts as long as this command runs, and ends with the job.
    """

    def tell(fault: FaultView) -> None:
        if not output.results(options, [fault]):
            what = " ".join(f"{name}={value}" for name, value in fault.fault.items())
            output.console().print(f"fault {fault.number}: {what}", markup=False)

    given = {"rank": rank, "at_step": at_step, "phase": phase, **_settings(set_ or [])}
    if duration is not None:
        given["duration_s"] = seconds(duration)
    how = {name: value for name, value in given.items() if value is not None}
    with options.connect() as client:
        job_id = client.find(job_word)
        if storm is None:
            for item in (kind, *others):
                tell(client.inject(job_id, item, **how))
            return ExitCode.OK
        if how:
            raise NotUnderstood(f"a storm chooses by itself: leave out {', '.join(how)}")
        ranks = math.prod(client.get(job_id).spec["parallel"].values())
        coming = fault_storm.strikes(_mtbf_s(storm), seed, (kind, *others), ranks)
        count = fault_storm.blow(client, job_id, coming, seconds(for_), tell)
    output.talk(f"{count} faults")
    return ExitCode.OK


def _mtbf_s(words: str) -> float:
    name, _, value = words.partition("=")
    if name != "mtbf" or not value or seconds(value) <= 0:
        raise NotUnderstood(f"{words!r} is no storm: write --storm mtbf=20s")
    return seconds(value)


def _settings(assignments: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not equals:
            raise NotUnderstood(f"{assignment!r}: write name=value")
        found[name] = _value(value)
    return found


def _value(text: str) -> int | float | str:
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text
