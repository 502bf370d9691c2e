"""Renders the pictures of `top` as text of a given width. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.text import Text

from holdfast.cli.printing import output, plots
from holdfast.cli.printing.columns import Column, lay
from holdfast.client.job_names import short
from holdfast_service.job_model.lifecycle import State
from holdfast_service.views.history import MetricPoint
from holdfast_service.views.incidents import IncidentView
from holdfast_service.views.jobs import JobView
from holdfast_service.views.lists import ClusterView, JobRow
from holdfast_service.views.ranks import RanksView, RankView
from holdfast_service.views.timeline import VerdictView
from holdfast_service.wording import plural

BAR = 12
SHOWN_INCIDENTS = 5
SLOW = 1.5
SILENT_S = 5.0

JOBS = (
    Column("ID", drop=3),
    Column("NAME", least=16),
    Column("STATE"),
    Column("PROGRESS", drop=5),
    Column("STEP", right=True),
    Column("LEFT", right=True),
    Column("LOSS", right=True, drop=2),
    Column("TOKENS/S", right=True, drop=4),
    Column("INC", right=True, drop=6),
    Column("AGE", right=True, drop=1),
)
RANKS = (
    Column("RANK", right=True),
    Column("NODE", least=8),
    Column("HOST", least=8, drop=3),
    Column("AGENT", drop=1),
    Column("PID", right=True, drop=4),
    Column("STEP", right=True),
    Column("PHASE", least=6),
    Column("BEHIND", right=True),
    Column("STEP TIME", right=True),
    Column("SLOW", right=True),
    Column("SILENT", right=True, drop=2),
)


def jobs(
    found: Sequence[JobRow], cluster: ClusterView, address: str, now: float, width: int
) -> Text:
    """The active jobs and the use of the cluster."""
    capacity = cluster.capacity
    head = Text.assemble(
        ("holdfast", "bold"),
        f"  {address}  {output.clock(now)}\n",
        f"free: {capacity.free_nodes} of {capacity.nodes} nodes, "
        f"{capacity.free_cpus:g} of {capacity.cpus:g} CPUs, "
        f"{capacity.free_gpus:g} of {capacity.gpus:g} GPUs",
    )
    for state, count in sorted(Counter(job.state for job in found).items()):
        head.append(", ").append(f"{count} ").append_text(output.state_text(state))
    if not found:
        return head.append("\n\nno active job; start one: holdfast submit FILE")
    prefixes = short([job.id for job in found])
    rows = [_job_row(prefix, job, now) for prefix, job in zip(prefixes, found, strict=True)]
    return Text("\n\n").join([head, lay(JOBS, rows, width)])


def job(
    seen: JobView,
    verdict: VerdictView,
    ranks: RanksView | None,
    incidents: Sequence[IncidentView],
    points: Sequence[MetricPoint],
    width: int,
) -> Text:
    """One job: its state, its last losses, its ranks, its last incidents."""
    parts = [_summary(seen, verdict, points, width)]
    if ranks is not None and ranks.ranks:
        title = Text(f"Attempt {ranks.attempt}, ranks", style="bold")
        shorten = output.NodeIdShortener(rank.node or "" for rank in ranks.ranks)
        lines = lay(RANKS, [_rank_row(rank, shorten) for rank in ranks.ranks], width)
        parts.append(Text("\n").join([title, lines]))
    if incidents:
        shown = [_incident(incident) for incident in incidents[-SHOWN_INCIDENTS:]]
        title = Text(f"Incidents ({len(incidents)})", style="bold")
        parts.append(Text("\n").join([title, *shown]))
    return Text("\n\n").join(parts)


def _summary(
    seen: JobView, verdict: VerdictView, points: Sequence[MetricPoint], width: int
) -> Text:
    progress = seen.progress
    text = Text.assemble(
        (seen.name, "bold"),
        f"  {seen.id}  ",
        output.state_text(seen.state),
        "\n",
        *_share_done(progress.step, progress.steps, max(10, min(40, width - 40))),
    )
    if verdict.eta_s is not None:
        text.append(f", {output.brief(verdict.eta_s)} left")
    text.append(f"\n{verdict.doing}")
    losses = [y for _, y in plots.finite([(point.step, _loss(point)) for point in points])]
    text.append(f"\nloss {output.number(progress.loss, '.4f')}")
    if losses:
        text.append(f"  {plots.spark(losses, max(10, min(60, width - 20)))}", style="cyan")
    goodput = output.number(verdict.goodput, ".1%")
    return text.append(
        f"\n{output.number(progress.tokens_per_second, ',.0f')} tokens/s, goodput {goodput}, "
        f"attempt {progress.attempt}, {plural(progress.incidents, 'incident')}, "
        f"{output.age(seen.created_at)} old"
    )


def _share_done(
    step: int | None, steps: int | None, cells: int
) -> tuple[str | tuple[str, str], ...]:
    if step is None:
        return ("no step reported",)
    if steps is None:
        return (f"step {step}",)
    done = f" {step / max(1, steps):.0%}  step {step} of {steps}"
    return (output.progress_bar(step, steps, cells), "green"), done


def _job_row(prefix: str, seen: JobRow, now: float) -> list[str | Text]:
    return [
        prefix,
        seen.name,
        output.state_text(seen.state),
        Text(output.progress_bar(seen.step, seen.steps, BAR), style="green"),
        output.row_steps(seen),
        output.brief(seen.eta_s),
        output.number(seen.loss, ".4f"),
        output.count(seen.tokens_per_second if seen.state is State.RUNNING else None),
        str(seen.incidents),
        output.brief(now - seen.created_at),
    ]


def _rank_row(rank: RankView, shorten: output.Shortener) -> list[str | Text]:
    slow = rank.slow_factor is not None and rank.slow_factor >= SLOW
    silent = rank.silent_s is not None and rank.silent_s >= SILENT_S
    return [
        str(rank.rank),
        shorten(rank.node) if rank.node else "-",
        rank.host,
        rank.agent,
        "-" if rank.pid is None else str(rank.pid),
        "-" if rank.step is None else str(rank.step),
        rank.phase or "-",
        "-" if rank.lag_steps is None else str(rank.lag_steps),
        "-" if rank.step_time_s is None else f"{rank.step_time_s * 1000:,.0f} ms",
        Text(
            "-" if rank.slow_factor is None else f"{rank.slow_factor:.2f}×",
            style="yellow" if slow else "",
        ),
        Text(output.seconds(rank.silent_s), style="yellow" if silent else ""),
    ]


def _incident(incident: IncidentView) -> Text:
    closed = incident.closed_at is not None
    total_s = incident.phases_s.get("total")
    took = f", {output.seconds(total_s)}" if closed and total_s is not None else ""
    return Text.assemble(
        (f"  {output.clock(incident.opened_at)} ", "dim"),
        (incident.cause, "" if closed else "yellow"),
        f": {incident.decision or 'not decided yet'}{took}" + ("" if closed else " (open)"),
    )


def _loss(point: MetricPoint) -> float | None:
    value = point.values.get("loss")
    return None if value is None or isinstance(value, str) else float(value)
