"""A job in full, for people: progress, attempts, incidents, checkpoints, and why it failed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from holdfast.cli import output
from holdfast.cli.columns import Column, lay
from holdfast_service.views.goodput import GoodputView
from holdfast_service.views.jobs import (
    AttemptView,
    CheckpointsView,
    GuardsView,
    IncidentView,
    JobView,
    MemberView,
    MemoryProtectionView,
    TripView,
)
from holdfast_service.views.timeline import VerdictView

PHASE_ORDER = (
    "detect",
    "gather",
    "fence",
    "decide",
    "form",
    "restore",
    "first_step",
    "total",
)
SHOWN_FRAMES = 6
MEMBERS = (
    Column(""),
    Column("rank", right=True),
    Column("agent"),
    Column("node", least=8),
    Column("host", least=8, drop=1),
    Column("pid", right=True),
    Column("role"),
)
TIER_WORDS = {
    "own_ram": "own RAM",
    "partner_ram": "a partner's RAM",
    "reshard": "RAM, from ranks of another mesh",
    "remote": "remote storage",
    "init": "what the job began with",
}


def show(
    console: Console,
    job: JobView,
    attempts: Sequence[AttemptView],
    incidents: Sequence[IncidentView],
    checkpoints: CheckpointsView,
    goodput: GoodputView,
) -> None:
    _summary(console, job)
    for line in (*goodput_lines(goodput), *trouble_lines(job)):
        console.print(output.fold(line, 2))
    for attempt in attempts:
        _attempt(console, attempt)
    for incident in incidents:
        console.print()
        for line in incident_lines(incident):
            console.print(output.fold(line, 14))
    for line in guard_lines(job.guards):
        console.print(output.fold(line, 12))
    kept = [point for point in checkpoints.remote if point.deleted_at is None]
    if kept:
        console.print("\nRemote checkpoints")
        for point in kept:
            bad = f"  BAD: {point.bad}" if point.bad else ""
            console.print(f"  step {point.step}, {point.nbytes:,} bytes, {point.uri}{bad}")
    if job.outcome is not None and job.outcome.traceback:
        console.print("\nTraceback of the failure")
        console.print(Text(job.outcome.traceback.rstrip()))


def verdict_text(job: JobView, verdict: VerdictView) -> Text:
    """How it stands, in plain words, before all the figures."""
    told = Text.assemble(
        (verdict.headline, f"bold {output.STATE_STYLES.get(job.state, '')}".strip())
    )
    for words in (verdict.doing, verdict.last, verdict.next):
        if words:
            told.append(f"\n{words}")
    used, lost = verdict.device_hours_used, verdict.device_hours_lost
    return told.append(f"\n{used:.2f} device-hours used, {lost:.2f} of them lost\n", "dim")


def trouble_lines(job: JobView) -> Iterable[Text]:
    """Which ranks are slow at present, and what was found of the health of the job's nodes."""
    for slow in job.stragglers:
        yield Text.assemble(
            ("Slow", "bold yellow"),
            f"  rank {slow.rank} on {slow.agent} (node {slow.node or '?'}) takes {slow.factor:.2f} "
            f"times as long as its peers since step {slow.since_step}, {output.ago(slow.since)}",
        )
    for node in job.unwell_nodes:
        where = f"{_ranks(node.ranks)} on" if node.ranks else "standby on"
        for finding in node.findings:
            yield Text.assemble(
                ("Health", "bold yellow"),
                f"  {where} node {node.node}: {finding.level} ({finding.probe}): {finding.what}",
            )


def incident_lines(incident: IncidentView) -> Iterable[Text]:
    """What was lost, what was decided, where the state came from, how long each phase took."""
    yield Text.assemble(
        (f"Incident {incident.number}", "bold yellow"),
        f": {incident.cause} in attempt {incident.attempt} at {output.clock(incident.opened_at)}",
    )
    if incident.lost:
        yield Text(f"  lost        {_listed(incident.lost)}")
    if incident.evidence:
        yield Text(f"  evidence    {_listed(incident.evidence)}")
    for suspect in incident.suspects:
        yield Text(f"  suspect     {_fact(suspect)}")
    for stack in incident.stacks:
        yield Text(f"  stack       {_where(stack)}")
    if incident.decision:
        why = f" ({incident.reason})" if incident.reason else ""
        yield Text(f"  decided     {incident.decision}{why}")
    for other in incident.refused:
        yield Text(f"  refused     {other.decision}: {other.why}")
    if incident.budget is not None:
        budget = incident.budget
        yield Text(
            f"  budget      {budget.failures_left} of {budget.max_failures} failures left within "
            f"{output.seconds(budget.window_s)}; {budget.without_progress} attempt(s) in a row "
            f"without a new step, {budget.max_without_progress} allowed"
        )
    if incident.restored_step is not None:
        lost = "" if incident.steps_lost is None else f", {incident.steps_lost} step(s) lost"
        lost += f", {incident.device_seconds_lost:.1f} device-seconds lost"
        yield Text(f"  restored    step {incident.restored_step}{lost}")
    if incident.tiers:
        yield Text(f"  state from  {tiers(incident.tiers)}")
    phases = phase_times(incident.phases_s)
    if phases:
        yield Text(f"  took        {phases}")
    if incident.resolution:
        yield Text(f"  resolution  {incident.resolution}")


def guard_lines(guards: GuardsView) -> Iterable[Text]:
    """What tripped, where it began, what was decided; and the data passed over."""
    if not guards.trips:
        return
    yield Text()
    told = f", the last {len(guards.recent)}" if guards.trips > len(guards.recent) else ""
    yield Text.assemble(("Guards", "bold yellow"), f": tripped {_times(guards.trips)}{told}")
    for trip in guards.recent:
        yield Text(f"  {output.clock(trip.at)}  step {trip.step}, {trip.kind}: {trip.why}")
        if trip.what:
            yield Text(f"            began {_place(trip)}")
        back = f" to step {trip.back_to}" if trip.back_to is not None else ""
        skipped = f", without {_windows(trip.skipped)}" if trip.skipped else ""
        yield Text(f"            decided: {trip.decision}{back}{skipped}")
    if guards.ledger:
        yield Text(f"  data passed over: {', '.join(map(_windows, guards.ledger))}")


def _place(trip: TripView) -> str:
    ranks = ", ".join(map(str, trip.ranks)) or "not known"
    layer = f" of {trip.layer}" if trip.layer else ""
    batch = f", micro-batch {trip.micro_batch}" if trip.micro_batch is not None else ""
    return f"on rank {ranks}{batch}, in the {trip.what}{layer}"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _windows(span: tuple[int, int]) -> str:
    first, end = span
    return f"window {first}" if end == first + 1 else f"windows {first} to {end - 1}"


def goodput_lines(told: GoodputView) -> Iterable[Text]:
    """`Goodput 0.912, effective training time 0.934 of 2 min`, and where the rest went."""
    if told.goodput is None or told.effective_training_time_ratio is None:
        return
    yield Text.assemble(
        ("Goodput", "bold"),
        f" {told.goodput:.3f}, effective training time {told.effective_training_time_ratio:.3f} "
        f"of {output.seconds(told.held_s)} on the cluster; "
        f"{told.device_seconds_lost:.1f} device-seconds lost to faults",
    )
    parts = sorted(told.by_kind_s.items(), key=lambda part: -part[1])
    yield Text("  " + ", ".join(f"{kind} {seconds:.1f} s" for kind, seconds in parts if seconds))


def tiers(of_rank: Mapping[str, str]) -> str:
    """`own RAM (ranks 0, 1, 2); a partner's RAM (rank 3)`."""
    ranks: dict[str, list[str]] = {}
    for rank, tier in sorted(of_rank.items(), key=lambda item: int(item[0])):
        ranks.setdefault(tier, []).append(rank)
    return "; ".join(
        f"{TIER_WORDS.get(tier, tier)} ({'rank' if len(held) == 1 else 'ranks'} {', '.join(held)})"
        for tier, held in ranks.items()
    )


def protection_lines(memory: MemoryProtectionView) -> Iterable[Text]:
    """What memory checkpoints survive, and what not."""
    odds = ", ".join(
        f"{lost} lost node{'s' if lost > 1 else ''}: {one.probability:.0%}"
        for lost, one in sorted(memory.recoverable.items())
    )
    copies = "1 copy" if memory.copies == 1 else f"{memory.copies} copies"
    yield Text(f"  memory  {copies} on other nodes; goes on from memory after {odds}")
    for gap in memory.unprotected:
        yield Text(f"  not protected: {gap}")


def phase_times(phases_s: Mapping[str, float | None]) -> str:
    known = [name for name in PHASE_ORDER if name in phases_s]
    rest = sorted(set(phases_s) - set(PHASE_ORDER))
    measured = [(name, phases_s[name]) for name in (*known, *rest)]
    return ", ".join(
        f"{name} {value * 1000:.0f} ms" for name, value in measured if value is not None
    )


def _summary(console: Console, job: JobView) -> None:
    progress = job.progress
    facts: list[tuple[str, str | Text]] = [
        ("Job", f"{job.name}  {job.id}"),
        ("State", output.state_text(job.state)),
        ("Progress", f"step {progress.step} of {progress.steps}, attempt {progress.attempt}"),
        ("Loss", output.number(progress.loss, ".4f")),
        ("Tokens/s", output.number(progress.tokens_per_second, ",.0f")),
        ("Incidents", str(progress.incidents)),
        ("Created", output.ago(job.created_at)),
    ]
    if job.started_at is not None and job.ended_at is not None:
        facts.append(("Ran for", output.seconds(job.ended_at - job.started_at)))
    if job.origin is not None:
        origin = job.origin
        facts.append(("Began with", f"{origin.what.value} of {origin.uri}, at step {origin.step}"))
    for tier, chosen in sorted(job.intervals.items()):
        facts.append(
            (f"{tier.capitalize()} saves", f"every {chosen.every_steps} steps: {chosen.why}")
        )
    if job.waiting is not None:
        facts.append(("Waits for", f"{job.waiting.resource}: {job.waiting.reason}"))
    if job.outcome is not None:
        facts.append(("Outcome", f"{job.outcome.code}: {job.outcome.message}"))
    margin = max(len(name) for name, _ in facts) + 2
    for name, value in facts:
        line = Text.assemble((name.ljust(margin), "bold"), value)
        console.print(output.fold(line, margin))


def _attempt(console: Console, attempt: AttemptView) -> None:
    mesh = " × ".join(f"{axis} {size}" for axis, size in attempt.mesh.items())
    steps = f"steps {attempt.first_step or '-'} to {attempt.last_step or '-'}"
    ended = f"; ended: {attempt.reason}" if attempt.reason else ""
    console.print()
    console.print(
        Text.assemble(
            (f"Attempt {attempt.number}", "bold"), f": {attempt.state}, {mesh}, {steps}{ended}"
        )
    )
    restored = attempt.restore.get("step")
    if restored:
        newest = attempt.restore.get("newest", {})
        there = ", ".join(f"{tier} {step}" for tier, step in newest.items())
        console.print(
            f"  restored step {restored} from {tiers(attempt.restore.get('tiers', {}))}"
            f" (newest in {there})"
        )
    members = [_member(member) for member in attempt.members]
    console.print(lay(MEMBERS, members, output.width()))
    if attempt.memory_protection is not None:
        for line in protection_lines(attempt.memory_protection):
            console.print(output.fold(line, 10))
    if attempt.standbys:
        counted = Counter(str(standby.get("agent", "?")) for standby in attempt.standbys)
        console.print(f"  standby: {', '.join(counted)}")


def _member(one: MemberView) -> list[str | Text]:
    pid = "-" if one.pid is None else str(one.pid)
    return ["", str(one.rank), one.agent, one.node_id, one.host, pid, one.role]


def _where(stack: Mapping[str, Any]) -> str:
    """`ranks 0 and 1 at all_reduce (...) from forward (...)`; in full over REST."""
    at = " from ".join(str(frame) for frame in (stack.get("frames") or ())[:SHOWN_FRAMES])
    return f"{_ranks(stack.get('ranks') or ())} at {at}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {_fact(tuple(ranks))}"


def _listed(values: Iterable[Any]) -> str:
    return "; ".join(_fact(value) for value in values)


def _fact(value: Any) -> str:
    if isinstance(value, Mapping):
        told = {key: fact for key, fact in value.items() if fact not in (None, "", [])}
        if "ranks" in told:
            told.pop("rank", None)
        return ", ".join(f"{key} {_fact(fact)}" for key, fact in told.items() if key != "cause")
    if isinstance(value, list | tuple):
        return " and ".join(map(str, value))
    return str(value)
