"""`upgrade`: lets the jobs of the cluster continue in processes of the server's build."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from rich.table import Table

from holdfast.cli.common import LONG_RETRY_S, OPTIONS, Options, seconds
from holdfast.cli.exit_codes import ExitCode
from holdfast.cli.printing import output
from holdfast.errors import JobChanged, JobEnded, JobNotFound, WaitTimeout
from holdfast_service.job_model.lifecycle import ON_CLUSTER, Desired, State
from holdfast_service.wording import plural

if TYPE_CHECKING:
    from holdfast.client.synchronous.jobs import Client
    from holdfast.schemas import Version
    from holdfast_service.views.jobs import JobView

POLL_S = 0.5


def upgrade(
    *,
    yes: Annotated[bool, Parameter(negative="", help="Do it; without this, only show it.")] = False,
    timeout: Annotated[
        str, Parameter(help="600, 10m: longest wait for each job to train again.")
    ] = "10m",
    options: Options = OPTIONS,
) -> ExitCode:
    """Let running jobs continue in the server's build of Holdfast, one after the other.

    Run it after the server was upgraded. Each job with processes of another build saves its state,
    leaves the cluster, is queued, and continues from that state. Jobs go on without it, in the
    build that they were started with, until a process of them has to be started again.
    """
    limit_s = seconds(timeout)
    with options.connect(LONG_RETRY_S) as client:
        server = client.version()
        jobs = [client.get(row.id) for row in client.list(state=sorted(ON_CLUSTER))]
        due = [job for job in jobs if _is_due(job, server)]
        if not yes:
            if not output.results(options, due):
                _print_plan(server, jobs)
            return ExitCode.OK
        done: list[JobView] = []
        for job in due:
            now = _restart(client, job, server, limit_s)
            if now is None:  # the others would fare no better
                break
            done.append(now)
    output.results(options, done)
    output.progress(f"{plural(len(done), 'job')} of {len(due)}")
    return ExitCode.OK if len(done) == len(due) else ExitCode.JOB_FAILED


def _is_due(job: JobView, server: Version) -> bool:
    """Whether the job is to run on, in another build than it does."""
    is_starting = job.build is None and job.state is State.STARTING
    return job.desired is Desired.RUNNING and job.build != server.build and not is_starting


def _print_plan(server: Version, jobs: list[JobView]) -> None:
    table = Table("job", "id", "state", "build", "what `holdfast upgrade --yes` does", box=None)
    for job in jobs:
        what = "nothing"
        if _is_due(job, server):
            step = job.progress.step
            state = "its state" if step is None else f"step {step} or a later one"
            what = f"saves {state}, gives its nodes back, resumes"
        table.add_row(job.name, job.id, output.state_text(job.state), job.build or "unknown", what)
    output.console().print(f"server: version {server.version}, build {server.build}")
    output.console().print(table if jobs else "no job is on the cluster")


def _restart(client: Client, job: JobView, server: Version, limit_s: float) -> JobView | None:
    """The job once it trains in the server's build, has ended or was stopped by its user; None: it
    failed, or does not train in time."""
    began = time.monotonic()
    try:
        client.restart(job.id, if_generation=job.generation)
        now = _wait(client, job, server, limit_s)
    except JobNotFound:
        return job
    except JobEnded:
        now = client.get(job.id)
    except (JobChanged, WaitTimeout) as error:
        output.progress(f"{job.name} ({job.id}): {error}")
        return None
    if now.state.terminal or now.desired is not Desired.RUNNING:
        output.progress(f"{job.name} ({job.id}): is {now.state.value}")
        return now if now.state is not State.FAILED else None
    attempts = client.attempts(job.id)
    before = max((attempt.last_step or 0 for attempt in attempts[:-1]), default=0)
    step = attempts[-1].restore.step or 0
    output.progress(
        f"{job.name} ({job.id}): trains from step {step} after {time.monotonic() - began:.1f} s, "
        f"{plural(max(0, before - step), 'step')} lost"
    )
    return now


def _wait(client: Client, job: JobView, server: Version, limit_s: float) -> JobView:
    deadline = time.monotonic() + limit_s
    while True:
        now = client.get(job.id)
        is_moved = now.state is State.RUNNING and now.build == server.build
        if is_moved or now.state.terminal or now.desired is not Desired.RUNNING:
            return now
        if time.monotonic() >= deadline:
            why = f", waiting for {now.waiting.resource}" if now.waiting else ""
            raise WaitTimeout(f"is {now.state.value} after {limit_s:g} s{why}, and goes on")
        time.sleep(POLL_S)
