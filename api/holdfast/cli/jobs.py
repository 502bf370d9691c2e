"""The commands `ls`, `describe`, `wait`, `cancel`, `pause`, `resume`, `resize`, `label`
and `remove`."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from rich.console import Console
from rich.text import Text

from holdfast.cli.common import (
    LONG_RETRY_S,
    OPTIONS,
    JobWord,
    NotUnderstood,
    Options,
    seconds,
)
from holdfast.cli.exit_codes import ExitCode, of_state
from holdfast.cli.printing import output
from holdfast.cli.printing.columns import Column
from holdfast.cli.printing.terminal_text import one_line
from holdfast_service.job_model.lifecycle import State
from holdfast_service.job_model.sort_order import Sort
from holdfast_service.wording import plural

if TYPE_CHECKING:
    from holdfast_service.views.jobs import JobView
    from holdfast_service.views.lists import JobRow
    from holdfast_service.views.timeline import VerdictView

REMOVAL_S = 600.0
"""Time that a storage may take to remove all checkpoints of a job."""
COLUMNS = (
    Column("ID"),
    Column("NAME", least=16),
    Column("STATE"),
    Column("STEP", right=True),
    Column("LEFT", right=True, drop=4),
    Column("LOSS", right=True, drop=3),
    Column("TOKENS/S", right=True, drop=7),
    Column("GOODPUT", right=True, drop=2),
    Column("ATT", right=True, drop=6),
    Column("INC", right=True, drop=1),
    Column("OWNER", least=6, drop=5),
    Column("AGE", right=True),
)


def ls(
    search: Annotated[
        str | None,
        Parameter(name="SEARCH", help="Part of a name or owner, or of an id its start or end."),
    ] = None,
    /,
    *,
    state: Annotated[
        list[State] | None, Parameter(negative="", help="Only jobs in this state.")
    ] = None,
    name: Annotated[str | None, Parameter(help="Only jobs with this name.")] = None,
    owner: Annotated[str | None, Parameter(help="Only jobs of this owner (labels.owner).")] = None,
    sort: Annotated[Sort, Parameter(help="The order; default: newest first.")] = Sort.CREATED,
    limit: Annotated[int, Parameter(help="Maximum number of jobs.")] = 50,
    options: Options = OPTIONS,
) -> ExitCode:
    """List jobs, newest first."""
    states = [wanted.value for wanted in state or []]
    with options.connect() as client:
        rows = client.list(search, name=name, state=states, owner=owner, sort=sort.value)
        jobs = list(itertools.islice(rows, limit))
    if options.plain and output.results(options, jobs):
        return ExitCode.OK
    if not jobs:
        output.progress(
            "no jobs"
            + (
                " match"
                if search or state or name or owner
                else "; start one: holdfast submit FILE"
            )
        )
        return ExitCode.OK
    shown = output.ids([job.id for job in jobs], wide=options.wide)
    lines = [_row(prefix, job) for prefix, job in zip(shown, jobs, strict=True)]
    output.table(COLUMNS, lines, whole=options.wide)
    return ExitCode.OK


def describe(
    job_word: JobWord,
    /,
    *,
    alternatives: Annotated[
        bool, Parameter(negative="", help="List the refused alternatives of each decision, too.")
    ] = False,
    options: Options = OPTIONS,
) -> ExitCode:
    """Show a job in full: attempts, incidents, checkpoints, the traceback of a failure."""
    from holdfast.cli.printing import describe as description

    with options.connect() as client:
        job = client.get(client.find(job_word))
        attempts = client.attempts(job.id)
        incidents = client.incidents(job.id)
        checkpoints = client.checkpoints(job.id)
        goodput = client.goodput(job.id)
        verdict = client.verdict(job.id)
    if not options.plain:
        for line in description.verdict_text(job, verdict).split("\n", allow_blank=True):
            output.console().print(output.fold(line, 0))
        description.show(
            output.console(),
            job,
            attempts,
            incidents,
            checkpoints,
            goodput,
            alternatives=alternatives,
        )
        return ExitCode.OK
    parts = {"attempts": attempts, "incidents": incidents}
    lists = {name: [view.model_dump(mode="json") for view in part] for name, part in parts.items()}
    rest = {"job": job, "checkpoints": checkpoints, "goodput": goodput, "verdict": verdict}
    document = {name: view.model_dump(mode="json") for name, view in rest.items()} | lists
    output.result(options, document)
    return ExitCode.OK


def wait(
    job_word: JobWord,
    /,
    *,
    timeout: Annotated[str | None, Parameter(help="600, 10m, 2h; exit code 6 after it.")] = None,
    options: Options = OPTIONS,
) -> ExitCode:
    """Wait until a job has ended. The exit code is the job's: 0, 1 failed, 7 cancelled."""
    limit_s = None if timeout is None else seconds(timeout)
    with options.connect(LONG_RETRY_S) as client:
        job = client.wait(client.find(job_word), limit_s)
        verdict = client.verdict(job.id)
    if not output.result(options, job):
        print_outcome(job, verdict)
    return of_state(job.state)


def cancel(
    job_word: JobWord | None = None,
    /,
    *,
    state: Annotated[
        list[State] | None, Parameter(negative="", help="All jobs in this state, instead of JOB.")
    ] = None,
    name: Annotated[str | None, Parameter(help="All jobs with this name.")] = None,
    owner: Annotated[str | None, Parameter(help="All jobs of this owner.")] = None,
    now: Annotated[
        bool, Parameter(negative="", help="Cancel at once, without a last checkpoint.")
    ] = False,
    options: Options = OPTIONS,
) -> ExitCode:
    """Save the last state of a job and end it. A second cancel ends it at once, like --now.

    It is a conflict (exit code 4) if the job has ended in another way. With --state, --name or
    --owner instead of JOB: all jobs that match.
    """
    if (job_word is None) == (state is None and name is None and owner is None):
        raise NotUnderstood("give either JOB, or --state, --name, --owner for all jobs that match")
    with options.connect() as client:
        if job_word is None:
            states = [wanted.value for wanted in state or []]
            found = client.cancel_matching(name=name, owner=owner, state=states, now=now)
            if not output.results(options, found):
                for stopped in found:
                    state_text = output.state_text(stopped.state)
                    output.console().print(state_text, f"{stopped.name} ({stopped.id})")
                output.progress(f"cancelled {plural(len(found), 'job')}")
            return ExitCode.OK
        job_id = client.find(job_word)
        again = client.get(job_id).state is State.CANCELLING
        job = client.cancel(job_id, now=now or again)
    return _print_state(job, options)


def label(
    job_word: JobWord,
    /,
    *changes: Annotated[
        str, Parameter(name="CHANGES", help="NAME=TEXT sets a label, NAME- removes it.")
    ],
    options: Options = OPTIONS,
) -> ExitCode:
    """Set or remove labels of a job; without changes, print them."""
    labels = dict(map(_label_change, changes))
    with options.connect() as client:
        job_id = client.find(job_word)
        job = client.set_labels(job_id, labels) if labels else client.get(job_id)
    if not output.result(options, job):
        for name, text in sorted(job.spec.get("labels", {}).items()):
            output.console().print(f"{name}={one_line(text)}")
    return ExitCode.OK


def priority(
    job_word: JobWord,
    value: Annotated[
        int, Parameter(name="PRIORITY", help="From -1000 to 1000: higher ones start first.")
    ],
    /,
    *,
    options: Options = OPTIONS,
) -> ExitCode:
    """Change the place of a job in the queue. Running jobs are not stopped for others."""
    with options.connect() as client:
        job = client.set_priority(client.find(job_word), value)
    if not output.result(options, job):
        output.progress(f"job {job.name} has priority {value}")
    return ExitCode.OK


def remove(
    job_word: JobWord,
    /,
    *,
    checkpoints: Annotated[
        bool, Parameter(negative="", help="Remove its checkpoints in the remote tier, too.")
    ] = False,
    options: Options = OPTIONS,
) -> ExitCode:
    """Remove an ended job with its history. Its checkpoints stay where they are."""
    with options.connect(timeout_s=REMOVAL_S) as client:
        removed = client.remove(client.find(job_word), with_checkpoints=checkpoints)
    if output.result(options, removed):
        return ExitCode.OK
    gone = len(removed.removed_checkpoints)
    with_them = f" with {plural(gone, 'checkpoint')}" if gone else ""
    output.console().print(f"removed job {removed.name} ({removed.id}){with_them}")
    for uri in removed.kept_checkpoints:
        output.progress(f"kept {uri}")
    return ExitCode.OK


def pause(job_word: JobWord, /, *, options: Options = OPTIONS) -> ExitCode:
    """Pause a job: it saves its state and releases its nodes until `resume`."""
    with options.connect() as client:
        return _print_state(client.pause(client.find(job_word)), options)


def resume(job_word: JobWord, /, *, options: Options = OPTIONS) -> ExitCode:
    """Resume a paused job from its saved state, bit for bit."""
    with options.connect() as client:
        return _print_state(client.resume(client.find(job_word)), options)


def restart(job_word: JobWord, /, *, options: Options = OPTIONS) -> ExitCode:
    """Save a job's state, give its nodes back, and continue it in new processes."""
    with options.connect() as client:
        return _print_state(client.restart(client.find(job_word)), options)


def resize(
    job_word: JobWord,
    /,
    *,
    nodes: Annotated[
        int | None, Parameter(help="Most nodes that train; default: as many as the spec allows.")
    ] = None,
    options: Options = OPTIONS,
) -> ExitCode:
    """Change the number of nodes of an elastic job, in its living processes."""
    with options.connect() as client:
        return _print_state(client.resize(client.find(job_word), nodes), options)


def print_outcome(
    job: JobView,
    verdict: VerdictView,
    console: Console | None = None,
    *,
    is_traceback_shown: bool = False,
) -> None:
    """Print how a job ended; to stderr the reason, if it did not succeed, and what it survived and
    where its result lies. `is_traceback_shown`: with the output of its ranks."""
    at = (f"at step {job.progress.step}",) if output.has_steps(job) else ()
    (console or output.console()).print(output.state_text(job.state), *at)
    if job.outcome is not None and job.state is not State.SUCCEEDED:
        output.progress(f"{job.outcome.code}: {job.outcome.message}")
        if job.outcome.traceback and not is_traceback_shown:
            output.progress(job.outcome.traceback.rstrip())
    output.progress(*filter(None, (verdict.last, verdict.next)))


def _label_change(change: str) -> tuple[str, str | None]:
    """Raises NotUnderstood."""
    name, separator, text = change.partition("=")
    if separator:
        return name, text
    if name.endswith("-"):
        return name[:-1], None
    raise NotUnderstood(f"{change!r} is not a change of a label: write NAME=TEXT, or NAME-")


def _row(shown_id: str, job: JobRow) -> list[str | Text]:
    return [
        shown_id,
        job.name,
        output.state_text(job.state),
        output.row_steps(job),
        output.brief(job.eta_s),
        output.number(job.loss, ".4f"),
        output.count(job.tokens_per_second if job.state is State.RUNNING else None),
        output.number(job.goodput, ".1%"),
        str(job.attempt),
        str(job.incidents),
        job.owner or "-",
        output.age(job.created_at),
    ]


def _print_state(job: JobView, options: Options) -> ExitCode:
    if output.result(options, job):
        return ExitCode.OK
    output.console().print(output.state_text(job.state))
    if job.desired.value != "running" and not job.state.terminal:
        output.progress(f"job {job.name}: the requested state is {job.desired.value}")
    return ExitCode.OK
