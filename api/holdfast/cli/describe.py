"""A job in full, for people: progress, attempts, incidents, checkpoints, and why it failed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from holdfast.cli import output
from holdfast_service.views import AttemptView, CheckpointView, IncidentView, JobView

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
TIER_WORDS = {
    "live": "the living processes",
    "own_ram": "own RAM",
    "partner_ram": "a partner's RAM",
    "remote": "remote storage",
    "init": "the seed (step 0)",
}


def show(
    console: Console,
    job: JobView,
    attempts: Sequence[AttemptView],
    incidents: Sequence[IncidentView],
    checkpoints: Sequence[CheckpointView],
) -> None:
    _summary(console, job)
    for attempt in attempts:
        _attempt(console, attempt)
    for incident in incidents:
        console.print()
        for line in incident_lines(incident):
            console.print(line)
    kept = [point for point in checkpoints if point.deleted_at is None]
    if kept:
        console.print("\nRemote checkpoints")
        for point in kept:
            bad = f"  BAD: {point.bad}" if point.bad else ""
            console.print(f"  step {point.step}, {point.nbytes:,} bytes, {point.uri}{bad}")
    if job.outcome is not None and job.outcome.traceback:
        console.print("\nTraceback of the failure")
        console.print(Text(job.outcome.traceback.rstrip()))


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
    if incident.decision:
        why = f" ({incident.reason})" if incident.reason else ""
        yield Text(f"  decided     {incident.decision}{why}")
    if incident.restored_step is not None:
        lost = "" if incident.steps_lost is None else f", {incident.steps_lost} step(s) lost"
        yield Text(f"  restored    step {incident.restored_step}{lost}")
    if incident.tiers:
        yield Text(f"  state from  {tiers(incident.tiers)}")
    phases = phase_times(incident.phases_s)
    if phases:
        yield Text(f"  took        {phases}")
    if incident.resolution:
        yield Text(f"  resolution  {incident.resolution}")


def tiers(of_rank: Mapping[str, str]) -> str:
    """`own RAM (ranks 0, 1, 2); a partner's RAM (rank 3)`."""
    ranks: dict[str, list[str]] = {}
    for rank, tier in sorted(of_rank.items(), key=lambda item: int(item[0])):
        ranks.setdefault(tier, []).append(rank)
    return "; ".join(
        f"{TIER_WORDS.get(tier, tier)} ({'rank' if len(held) == 1 else 'ranks'} {', '.join(held)})"
        for tier, held in ranks.items()
    )


def phase_times(phases_s: Mapping[str, float | None]) -> str:
    known = [name for name in PHASE_ORDER if name in phases_s]
    rest = sorted(set(phases_s) - set(PHASE_ORDER))
    measured = [(name, phases_s[name]) for name in (*known, *rest)]
    return ", ".join(
        f"{name} {value * 1000:.0f} ms" for name, value in measured if value is not None
    )


def _summary(console: Console, job: JobView) -> None:
    progress = job.progress
    facts: list[tuple[str, Any]] = [
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
    if job.waiting is not None:
        facts.append(("Waits for", f"{job.waiting.resource}: {job.waiting.reason}"))
    if job.outcome is not None:
        facts.append(("Outcome", f"{job.outcome.code}: {job.outcome.message}"))
    table = Table.grid(padding=(0, 2))
    for name, value in facts:
        table.add_row(Text(name, style="bold"), value)
    console.print(table)


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
        console.print(f"  restored step {restored} from {tiers(attempt.restore.get('tiers', {}))}")
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("  rank", "agent", "node", "host", "pid", "role"):
        table.add_column(heading)
    for member in attempt.members:
        pid = "-" if member.pid is None else str(member.pid)
        row = (member.agent, member.node_id[:8], member.host, pid, member.role)
        table.add_row(f"  {member.rank}", *row)
    console.print(table)
    if attempt.standbys:
        counted = Counter(str(standby.get("agent", "?")) for standby in attempt.standbys)
        console.print(f"  standby: {', '.join(counted)}")


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
