"""`inject`: injects a fault, or a storm of faults, into a running job."""

from __future__ import annotations

from typing import Annotated, Any

from cyclopts import Parameter

from holdfast.cli.common import OPTIONS, JobWord, NotUnderstood, Options, seconds
from holdfast.cli.exit_codes import ExitCode
from holdfast.cli.printing import output
from holdfast.client import fault_storm
from holdfast_service.job_model.admission import stored_world_size
from holdfast_service.views.incidents import FaultView
from holdfast_workers.fault_injection.kinds import FaultKind


def inject(
    job_word: JobWord,
    kind: Annotated[FaultKind, Parameter(help="The fault; operations/drills.md has the table.")],
    /,
    *others: Annotated[FaultKind, Parameter(help="More kinds, for a storm.")],
    rank: Annotated[int | None, Parameter(help="The rank; default: a random rank.")] = None,
    at_step: Annotated[int | None, Parameter(help="When the rank reaches this step.")] = None,
    phase: Annotated[str | None, Parameter(help="In this phase of a step or recovery.")] = None,
    duration: Annotated[
        str | None, Parameter(help="Duration of the fault: 500ms, 20s, 5m.")
    ] = None,
    set_: Annotated[
        list[str] | None,
        Parameter(
            name="--set", negative="", help="Other settings of the kind: factor=3, where=..."
        ),
    ] = None,
    storm: Annotated[str | None, Parameter(help="mtbf=20s: repeatedly, on random ranks.")] = None,
    seed: Annotated[int, Parameter(help="Seed of the storm.")] = 0,
    for_: Annotated[str, Parameter(name="--for", help="Duration of the storm.")] = "5m",
    options: Options = OPTIONS,
) -> ExitCode:
    """Inject a fault into a running job. The server must allow it: serve --allow-fault-injection.

    A storm ends with this command, and with the job.
    """

    def report(fault: FaultView) -> None:
        if not output.result(options, fault):
            settings = " ".join(f"{name}={value}" for name, value in fault.fault.items())
            output.console().print(f"fault {fault.number}: {settings}")

    given = {"rank": rank, "at_step": at_step, "phase": phase, **_settings(set_ or [])}
    if duration is not None:
        given["duration_s"] = seconds(duration)
    parameters = {name: value for name, value in given.items() if value is not None}
    with options.connect() as client:
        job_id = client.find(job_word)
        if storm is None:
            for fault_kind in (kind, *others):
                report(client.inject(job_id, fault_kind, **parameters))
            return ExitCode.OK
        if parameters:
            names = ", ".join(parameters)
            raise NotUnderstood(f"a storm chooses these settings randomly: leave out {names}")
        ranks = stored_world_size(client.get(job_id).spec)
        schedule = fault_storm.schedule(_mtbf_s(storm), seed, (kind, *others), ranks)
        count = fault_storm.run(client, job_id, schedule, seconds(for_), report)
    output.progress(f"{count} faults")
    return ExitCode.OK


def _mtbf_s(text: str) -> float:
    name, _, value = text.partition("=")
    if name != "mtbf" or not value or seconds(value) <= 0:
        raise NotUnderstood(f"{text!r} does not describe a storm: write --storm mtbf=20s")
    return seconds(value)


def _settings(assignments: list[str]) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not equals:
            raise NotUnderstood(f"{assignment!r}: write name=value")
        settings[name] = _value(value)
    return settings


def _value(text: str) -> int | float | str:
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text
