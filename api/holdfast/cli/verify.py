"""`verify`: replays a job undisturbed on the same meshes and compares the digests of each step."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from rich.text import Text

from holdfast.cli.common import LONG_RETRY_S, OPTIONS, JobWord, Options, seconds
from holdfast.cli.exit_codes import ExitCode
from holdfast.cli.printing import output
from holdfast.errors import Conflict, WaitTimeout
from holdfast_service.job_model.lifecycle import STOPPED_EARLY
from holdfast_service.job_model.replay import replay_mark
from holdfast_service.views.comparison import ComparisonView, ReplayResult
from holdfast_service.wording import plural

if TYPE_CHECKING:
    from holdfast.client.synchronous.jobs import Client
    from holdfast_service.views.jobs import JobView

POLL_S = 1.0
POLL_FACTOR = 10.0
"""Comparing a long job takes a while: at most a tenth of the time is spent on it."""
EXIT_CODES = {ReplayResult.EQUAL: ExitCode.OK, ReplayResult.DIFFERENT: ExitCode.JOB_FAILED}


def verify(
    job_word: JobWord,
    /,
    *,
    wait: Annotated[
        bool, Parameter(help="Wait for the result; otherwise print the id of the replay.")
    ] = True,
    timeout: Annotated[
        str, Parameter(help="600, 10m, 2h: longest wait; exit code 6 after it.")
    ] = "24h",
    options: Options = OPTIONS,
) -> ExitCode:
    """Prove the bits of a job: replay its steps so far, undisturbed, on the same meshes.

    With a replay as JOB, go on with that one. The exit code is 0 if all steps are equal, 1 if a
    step differs, 2 if it could not be found out. Ctrl-C leaves the replay running.
    """
    limit_s = seconds(timeout)
    with options.connect(LONG_RETRY_S) as client:
        job = client.get(client.find(job_word))
        replay = job if replay_mark(job.spec) is not None else client.replay(job.id)
        if not wait:
            if not output.result(options, replay):
                output.console().print(replay.id)
            output.progress(*_go_on(replay))
            return ExitCode.OK
        try:
            found = _follow(client, replay, limit_s)
        except (KeyboardInterrupt, WaitTimeout):
            output.progress(*_go_on(replay))
            raise
        replay = _finish(client, replay.id, found)
    if not output.result(options, found):
        output.console().print(result_text(found, replay))
    return EXIT_CODES.get(found.result, ExitCode.USAGE)


def result_text(found: ComparisonView, replay: JobView) -> str:
    """The result in a sentence."""
    equal = f"{found.equal} of {plural(found.compared, 'step')} equal"
    match found.result:
        case ReplayResult.EQUAL | ReplayResult.RUNNING:
            return f"{equal} on {meshes_text(found)}{_one_sided_text(found)}"
        case ReplayResult.DIFFERENT:
            first = found.first_difference
            assert first is not None
            return (
                f"different: step {first.step} has the digest {first.original} in the job and "
                f"{first.replay} in its replay; {equal}"
            )
        case ReplayResult.DISTURBED:
            return (
                f"disturbed: the job and its replay have different meshes after step "
                f"{found.same_meshes_until}; {equal} up to there. Run it again: "
                f"holdfast verify {found.original}"
            )
        case ReplayResult.INCOMPLETE:
            why = f": {replay.outcome.message}" if replay.outcome and replay.outcome.message else ""
            return (
                f"incomplete: the replay is {replay.state.value} at step {found.reached_step} of "
                f"{found.until_step}{why}; {equal}"
            )


def meshes_text(found: ComparisonView) -> str:
    """`3 meshes (4 ranks to step 40, 2 to step 90, 3 to step 120)`, `1 mesh (4 ranks)`."""
    ranks = [str(span.ranks) for span in found.meshes]
    if len(ranks) == 1:
        return f"1 mesh ({plural(found.meshes[0].ranks, 'rank')})"
    ends = [*(span.after_step for span in found.meshes[1:]), found.until_step]
    ranks[:1] = [plural(span.ranks, "rank") for span in found.meshes[:1]]
    parts = [f"{size} to step {end}" for size, end in zip(ranks, ends, strict=True)]
    return f"{len(parts)} meshes ({', '.join(parts)})"


def _one_sided_text(found: ComparisonView) -> str:
    if not found.one_sided:
        return ""
    return f"; {plural(found.one_sided, 'step')} with a digest in only one of the runs"


def _follow(client: Client, replay: JobView, limit_s: float) -> ComparisonView:
    """Show the replay until its comparison has a result. Raises WaitTimeout."""
    output.progress(f"replay {replay.id}")
    with output.changing_line() as show:
        return _compared(client, replay.id, limit_s, show)


def _compared(
    client: Client, replay_id: str, limit_s: float, draw: Callable[[Text], None]
) -> ComparisonView:
    deadline = time.monotonic() + limit_s
    while True:
        began = time.monotonic()
        replay, found = client.get(replay_id), client.comparison(replay_id)
        if found.result is not ReplayResult.RUNNING:
            return found
        draw(_progress_text(replay, found))
        now = time.monotonic()
        if now >= deadline:
            raise WaitTimeout(
                f"the replay has computed step {found.reached_step} of {found.until_step} after "
                f"{limit_s:g} s, and goes on"
            )
        time.sleep(min(max(POLL_S, POLL_FACTOR * (now - began)), deadline - now))


def _progress_text(replay: JobView, found: ComparisonView) -> Text:
    text = f"  step {found.reached_step} of {found.until_step}, {found.equal} equal"
    if replay.waiting is not None:
        text += f"; waiting for {replay.waiting.resource}: {replay.waiting.reason}"
    return Text.assemble(output.state_text(replay.state), text)


def _finish(client: Client, replay_id: str, found: ComparisonView) -> JobView:
    """End a replay that has nothing more to show; one that is at its end ends by itself."""
    replay = client.get(replay_id)
    is_equal = found.result is ReplayResult.EQUAL
    at_its_end = is_equal and found.until_step == _last_step(client, replay, found)
    if not replay.state.terminal and not at_its_end:
        with contextlib.suppress(Conflict):  # it has just ended
            return client.cancel(replay_id, now=True)
    return replay


def _last_step(client: Client, replay: JobView, found: ComparisonView) -> int | None:
    """The step after which an equal replay ends by itself: an early stop is a part of the state."""
    original = client.get(found.original)
    if original.outcome is not None and original.outcome.code == STOPPED_EARLY:
        return original.progress.step
    return replay.progress.steps


def _go_on(replay: JobView) -> list[Text]:
    (replay_id,) = output.ids([replay.id])
    return [
        Text.assemble(("the replay runs", "bold"), f": job {replay.name}"),
        Text(f"  holdfast verify {replay_id}    waits for its result"),
        Text(f"  holdfast cancel {replay_id}    ends it"),
    ]
