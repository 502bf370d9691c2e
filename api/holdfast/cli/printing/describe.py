"""Shows a job in full as text: progress, attempts, incidents, checkpoints, and why it failed."""

from __future__ import annotations

import itertools
import shlex
import time
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from holdfast.cli.printing import output
from holdfast.cli.printing.columns import ELLIPSIS, Column, lay
from holdfast_service.placement.memory_protection import MemoryProtection
from holdfast_service.views.attempts import AttemptView, MemberView
from holdfast_service.views.goodput import GoodputView
from holdfast_service.views.incident_text import tiers_text
from holdfast_service.views.incidents import IncidentView, SentenceSubject
from holdfast_service.views.jobs import (
    GuardsView,
    JobView,
    ProgressView,
    SourceReadView,
    TripView,
)
from holdfast_service.views.pages import CheckpointPage
from holdfast_service.views.start_text import is_start, start_text
from holdfast_service.views.timeline import VerdictView
from holdfast_service.wording import device_share, mesh_text, plural, ranks_text, sentence

MEMBERS = (
    Column(""),
    Column("rank", right=True),
    Column("agent"),
    Column("node", least=8),
    Column("host", least=8, drop=1),
    Column("pid", right=True),
    Column("role"),
)
SOURCES = (
    Column(""),
    Column("source", least=12),
    Column("weight", right=True, drop=1),
    Column("tokens", right=True),
    Column("seen", right=True),
    Column("epoch", right=True),
)
MOST_OF_PATH = 48
INCIDENT_INDENT = 4


def show(
    console: Console,
    job: JobView,
    attempts: Sequence[AttemptView],
    incidents: Sequence[IncidentView],
    checkpoints: CheckpointPage,
    goodput: GoodputView,
    *,
    alternatives: bool = False,
) -> None:
    """Print everything. `alternatives`: list the refused alternatives of every decision."""
    views = (job, *attempts, *incidents)
    shorten = output.NodeIdShortener(view.model_dump_json() for view in views)
    (short_id,) = output.ids([job.id])
    _print_summary(console, job)
    if job.reads is not None:
        console.print(Text("\nSources", "bold"))
        console.print(lay(SOURCES, [*map(_source_row, job.reads.sources)], output.width()))
        console.print()
    for line in (*goodput_lines(goodput), *node_problem_lines(job, shorten)):
        console.print(output.fold(line, 2))
    for attempt in attempts:
        _print_attempt(console, attempt, shorten, job.brings.is_program)
    for incident in incidents:
        console.print()
        for line in incident_lines(incident, shorten, job=short_id, alternatives=alternatives):
            console.print(output.fold(line, INCIDENT_INDENT))
    for line in guard_lines(job.guards):
        console.print(output.fold(line, 12))
    kept = [checkpoint for checkpoint in checkpoints.items if checkpoint.deleted_at is None]
    if kept:
        console.print("\nRemote checkpoints")
        for checkpoint in kept:
            bad = f"  BAD: {checkpoint.bad}" if checkpoint.bad else ""
            console.print(
                f"  step {checkpoint.step}, {checkpoint.nbytes:,} bytes, {checkpoint.uri}{bad}"
            )
    if job.outcome is not None and job.outcome.traceback:
        console.print("\nTraceback of the failure")
        console.print(Text(job.outcome.traceback.rstrip()))


def verdict_text(job: JobView, verdict: VerdictView) -> Text:
    """The state of the job in sentences; it stands before all figures."""
    text = Text.assemble(
        (verdict.headline, f"bold {output.STATE_STYLES.get(job.state, '')}".strip())
    )
    for line in verdict.lines:
        text.append(f"\n{line}")
    lost = device_share(verdict.device_hours_lost * 3600, verdict.device_hours_used * 3600)
    return text.append(f"\n{lost} lost\n", "dim")


def node_problem_lines(job: JobView, shorten: output.Shortener) -> Iterable[Text]:
    """The ranks that are slow at present, and the health findings of the job's nodes."""
    for slow in job.stragglers:
        node = shorten(slow.node) or "?"
        yield Text.assemble(
            ("Slow", "bold yellow"),
            f"  rank {slow.rank} on {slow.agent} (node {node}) takes {slow.factor:.2f} "
            f"times as long as its peers since step {slow.since_step}, {output.ago(slow.since)}",
        )
    for unwell in job.unwell_nodes:
        where = f"{ranks_text(unwell.ranks)} on" if unwell.ranks else "standby on"
        node = shorten(unwell.node)
        for finding in unwell.findings:
            yield Text.assemble(
                ("Health", "bold yellow"),
                f"  {where} node {node}: {finding.level} ({finding.probe}): {finding.what}",
            )


def incident_lines(
    incident: IncidentView,
    shorten: output.Shortener | None = None,
    *,
    job: str | None = None,
    alternatives: bool = False,
) -> Iterable[Text]:
    """The incident in sentences, a paragraph a line. `shorten` cuts node ids; by default to what is
    unique in this incident. Without `alternatives`, those that were refused are counted, with the
    command that lists them for `job`; None: they are left out."""
    shorten = shorten or output.NodeIdShortener([incident.model_dump_json()])
    yield Text.assemble(
        (f"Incident {incident.number}", "bold yellow"),
        f" at {output.clock(incident.opened_at)} in attempt {incident.attempt}: "
        f"{incident.title} ({incident.cause}).",
    )
    for about, sentences in itertools.groupby(incident.text, lambda part: part.about):
        if about == SentenceSubject.REFUSED and not alternatives:
            if job is not None:
                yield Text(f"  {_refused_count(incident, job)}")
        else:
            yield from (Text(f"  {shorten(part.text)}") for part in sentences)


def _refused_count(incident: IncidentView, job: str) -> str:
    count = plural(len(incident.refused), "alternative")
    verb = "was" if len(incident.refused) == 1 else "were"
    command = f"holdfast incidents {job} {incident.number} --alternatives"
    return f"{count} {verb} refused; `{command}` lists them."


def guard_lines(guards: GuardsView) -> Iterable[Text]:
    """Every guard trip: its reason, its origin and the decision; then the skipped data windows."""
    if not guards.trips:
        return
    yield Text()
    limit = f", the last {len(guards.recent)}" if guards.trips > len(guards.recent) else ""
    yield Text.assemble(("Guards", "bold yellow"), f": tripped {_times(guards.trips)}{limit}")
    for trip in guards.recent:
        yield Text(f"  {output.clock(trip.at)}  step {trip.step}, {trip.kind}: {trip.why}")
        if trip.what:
            yield Text(f"            It started {_origin(trip)}.")
        back = f" to step {trip.back_to}" if trip.back_to is not None else ""
        skipped = f", without {_windows(trip.skipped)}" if trip.skipped else ""
        yield Text(f"            {sentence(f'The decision was to {trip.decision}{back}{skipped}')}")
    if guards.ledger:
        yield Text(f"  Skipped data: {', '.join(map(_windows, guards.ledger))}.")


def _origin(trip: TripView) -> str:
    ranks = ", ".join(map(str, trip.ranks)) or "not known"
    layer = f" of {trip.layer}" if trip.layer else ""
    batch = f", micro-batch {trip.micro_batch}" if trip.micro_batch is not None else ""
    return f"on rank {ranks}{batch}, in the {trip.what}{layer}"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _windows(span: tuple[int, int]) -> str:
    first, end = span
    return f"window {first}" if end == first + 1 else f"windows {first} to {end - 1}"


def goodput_lines(goodput: GoodputView) -> Iterable[Text]:
    """`Goodput 0.912, effective training time 0.934 of 2 min`, then the time of each kind."""
    ratio = goodput.effective_training_time_ratio
    if goodput.goodput is None or ratio is None:
        return
    yield Text.assemble(
        ("Goodput", "bold"),
        f" {goodput.goodput:.3f}, effective training time {ratio:.3f} "
        f"of {output.seconds(goodput.held_s)} on the cluster; "
        f"{device_share(goodput.device_seconds_lost, goodput.device_seconds_held)} lost to faults",
    )
    parts = sorted(goodput.by_kind_s.items(), key=lambda part: -part[1])
    yield Text("  " + ", ".join(f"{kind} {seconds:.1f} s" for kind, seconds in parts if seconds))


def protection_lines(memory: MemoryProtection) -> Iterable[Text]:
    """The failures that the memory checkpoints survive, and those that they do not."""
    odds = ", ".join(
        f"{plural(lost, 'lost node')}: {odd.probability:.0%}"
        for lost, odd in sorted(memory.recoverable.items())
    )
    if memory.copies or any(odd.probability > 0 for odd in memory.recoverable.values()):
        count = (
            plural(memory.copies, "copy", "copies") if memory.copies else "no copy of some ranks"
        )
        yield Text(f"  memory  {count} on other nodes; training continues from memory after {odds}")
    else:
        yield Text("  memory  on the node of each rank only: it outlives processes, not the node")
    for gap in memory.unprotected:
        yield Text(f"  not protected: {gap}")


def _print_summary(console: Console, job: JobView) -> None:
    progress = job.progress
    facts: list[tuple[str, str | Text]] = [
        ("Job", f"{job.name}  {job.id}"),
        ("State", output.state_text(job.state)),
        ("Progress", _progress(progress)),
        ("Loss", output.number(progress.loss, ".4f")),
        ("Tokens/s", output.number(progress.tokens_per_second, ",.0f")),
        ("Incidents", str(progress.incidents)),
        ("Created", output.ago(job.created_at)),
    ]
    is_program = job.brings.is_program
    if is_program:
        facts += _level_facts(job)
    elif (job.spec.get("train") or {}).get("deterministic") == "fast":
        facts.append(("Bits", "may differ between runs on accelerators: deterministic is fast"))
    facts += _data_facts(job)
    if job.started_at is not None and job.ended_at is not None:
        facts.append(("Ran for", output.seconds(job.ended_at - job.started_at)))
    if job.origin is not None:
        origin = job.origin
        facts.append(
            ("Started from", f"{origin.what.value} of {origin.uri}, at step {origin.step}")
        )
    for tier, chosen in sorted(job.intervals.items()):
        facts.append(
            (f"{tier.capitalize()} saves", f"every {chosen.every_steps} steps: {chosen.why}")
        )
    if job.waiting is not None and is_start(job.waiting):
        facts.append(("Starting", start_text(job.progress.attempt, job.waiting, time.time())))
    elif job.waiting is not None:
        facts.append(("Waiting for", f"{job.waiting.resource}: {job.waiting.reason}"))
        if (asked := job.waiting.asked) is not None:
            size = f"{asked.cpus:g} CPUs and {asked.gpus:g} GPUs"
            since = output.ago(asked.since)
            facts.append(("Asked for", f"{asked.nodes} more nodes of {size}, first {since}"))
    if job.outcome is not None:
        facts.append(("Outcome", f"{job.outcome.code}: {job.outcome.message}"))
    margin = max(len(name) for name, _ in facts) + 2
    for name, value in facts:
        line = Text.assemble((name.ljust(margin), "bold"), value)
        console.print(output.fold(line, margin))
    if is_program and job.next_level is not None:
        console.print("\nLines worth adding next", style="bold")
        for text in job.next_level.lines.splitlines():
            console.print(f"  {text}")


def _progress(progress: ProgressView) -> str:
    if progress.step is None:
        return f"no step reported, attempt {progress.attempt}"
    of = f" of {progress.steps}" if progress.steps is not None else ""
    return f"step {progress.step}{of}, attempt {progress.attempt}"


def _data_facts(job: JobView) -> list[tuple[str, str | Text]]:
    return [] if job.reads is None else [("Tokenizer", job.reads.tokenizer)]


def _source_row(source: SourceReadView) -> list[str | Text]:
    return [
        "",
        _shortened(source.path),
        output.number(source.weight, "g"),
        output.number(source.tokens, ","),
        output.number(source.tokens_seen, ","),
        output.number(source.epochs, ".2f"),
    ]


def _shortened(path: str) -> str:
    """Cut in the middle: a path is known by its beginning and its end."""
    if len(path) <= MOST_OF_PATH:
        return path
    end = MOST_OF_PATH * 2 // 3
    return f"{path[: MOST_OF_PATH - 1 - end]}{ELLIPSIS}{path[-end:]}"


def _level_facts(job: JobView) -> list[tuple[str, str | Text]]:
    """What runs, how much it works with Holdfast, and what its next lines would bring."""
    facts: list[tuple[str, str | Text]] = [
        (job.brings.value.replace("_", " ").capitalize(), command_line(job.spec[job.brings.value]))
    ]
    if job.level is not None:
        through = f", through {job.integration}" if job.integration else ""
        facts.append(("Level", f"{job.level}{through}: {job.gives}"))
    if job.next_level is not None:
        facts.append(("Worth adding", job.next_level.gives))
    return facts


def command_line(brought: Any) -> str:
    """As a shell takes it."""
    return shlex.join(map(str, brought)) if isinstance(brought, list | tuple) else str(brought)


def _print_attempt(
    console: Console, attempt: AttemptView, shorten: output.Shortener, is_program: bool
) -> None:
    mesh = mesh_text(attempt.mesh)
    first, last = (
        "-" if step is None else step for step in (attempt.first_step, attempt.last_step)
    )
    steps = f"steps {first} to {last}"
    ended = f"; ended: {attempt.reason}" if attempt.reason else ""
    console.print()
    console.print(
        Text.assemble(
            (f"Attempt {attempt.number}", "bold"), f": {attempt.state}, {mesh}, {steps}{ended}"
        )
    )
    restore = attempt.restore
    if restore.step and not restore.tiers:
        console.print(f"  went on from step {restore.step}, as the program's first step tells")
    elif restore.step:
        newest_steps = ", ".join(f"{tier} {step}" for tier, step in restore.newest.items())
        does = "was offered" if is_program else "restored"
        console.print(
            f"  {does} step {restore.step} from {tiers_text(restore.tiers)}"
            f" (newest in {newest_steps})"
        )
    members = [_member_row(member, shorten) for member in attempt.members]
    console.print(lay(MEMBERS, members, output.width()))
    if attempt.memory_protection is not None:
        for line in protection_lines(attempt.memory_protection):
            console.print(output.fold(line, 10))
    if attempt.standbys:
        names = dict.fromkeys(standby.agent for standby in attempt.standbys)
        console.print(f"  standby: {', '.join(names)}")


def _member_row(member: MemberView, shorten: output.Shortener) -> list[str | Text]:
    pid = "-" if member.pid is None else str(member.pid)
    node = shorten(member.node_id)
    return ["", str(member.rank), member.agent, node, member.host, pid, member.role]
