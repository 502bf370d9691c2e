"""What `top` shows, as text of a given width. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.text import Text

from holdfast.cli import output, plots
from holdfast.cli.columns import Column, lay
from holdfast.client.names import short
from holdfast_service.lifecycle import State
from holdfast_service.views import AttemptView, IncidentView, JobView, MetricPoint, NodeView

BAR = 12
SHOWN_INCIDENTS = 5

JOBS = (
    Column("ID", drop=3),
    Column("NAME", least=8),
    Column("STATE"),
    Column("PROGRESS", drop=4),
    Column("STEP", right=True),
    Column("LOSS", right=True, drop=2),
    Column("TOKENS/S", right=True),
    Column("INC", right=True, drop=5),
    Column("AGE", right=True),
)
RANKS = (
    Column("RANK", right=True),
    Column("NODE", least=8),
    Column("HOST", least=8, drop=1),
    Column("AGENT"),
    Column("PID", right=True, drop=2),
    Column("ROLE", drop=3),
    Column("", least=6),
)


def jobs(
    found: Sequence[JobView], nodes: Sequence[NodeView], address: str, now: float, width: int
) -> Text:
    """The living jobs, and how full the cluster is."""
    there = [node for node in nodes if node.there]
    aside = sum(node.state.value != "ready" for node in there)
    counts = Counter(job.state for job in found)
    head = Text.assemble(
        ("holdfast", "bold"),
        f"  {address}  {output.clock(now)}\n",
        f"{len(there)} nodes",
        f" ({aside} set aside)" if aside else "",
        f", {sum(node.cpus for node in there):g} CPUs, {sum(node.gpus for node in there):g} GPUs",
        f"; {len(found)} living jobs",
    )
    for state, count in sorted(counts.items()):
        head.append(", ").append(f"{count} ").append_text(output.state_text(state))
    if not found:
        return head.append("\n\nnothing to do: holdfast submit FILE")
    prefixes = short([job.id for job in found])
    rows = [_job_row(prefix, job, now) for prefix, job in zip(prefixes, found, strict=True)]
    return Text("\n\n").join([head, lay(JOBS, rows, width)])


def job(
    seen: JobView,
    attempt: AttemptView | None,
    incidents: Sequence[IncidentView],
    points: Sequence[MetricPoint],
    now: float,
    width: int,
) -> Text:
    """One job: how far it is, its last losses, its ranks, its last incidents."""
    parts = [_summary(seen, points, now, width)]
    if attempt is not None and not seen.state.terminal:
        mesh = " × ".join(f"{axis} {size}" for axis, size in attempt.mesh.items())
        title = Text(f"Attempt {attempt.number}, {attempt.state}: {mesh}", style="bold")
        slow = {one.rank: f"slow, {one.factor:.2f}×" for one in seen.stragglers}
        rows: list[list[str | Text]] = [
            [
                str(one.rank),
                one.node_id[:16],
                one.host,
                one.agent,
                "-" if one.pid is None else str(one.pid),
                one.role,
                Text(slow.get(one.rank, ""), style="yellow"),
            ]
            for one in attempt.members
        ]
        parts.append(Text("\n").join([title, lay(RANKS, rows, width)]))
    if incidents:
        shown = [_incident(one) for one in incidents[-SHOWN_INCIDENTS:]]
        title = Text(f"Incidents ({len(incidents)})", style="bold")
        parts.append(Text("\n").join([title, *shown]))
    return Text("\n\n").join(parts)


def remaining_s(seen: JobView, points: Sequence[MetricPoint]) -> float | None:
    """Until the last step, at the pace of the last points; None: it makes no steps."""
    if seen.state is not State.RUNNING or len(points) < 2:
        return None
    first, last = points[0], points[-1]
    if last.at <= first.at or last.step <= first.step:
        return None
    pace = (last.at - first.at) / (last.step - first.step)
    return max(0.0, pace * (seen.progress.steps - last.step))


def _summary(seen: JobView, points: Sequence[MetricPoint], now: float, width: int) -> Text:
    progress = seen.progress
    share = progress.step / max(1, progress.steps)
    text = Text.assemble(
        (seen.name, "bold"),
        f"  {seen.id}  ",
        output.state_text(seen.state),
        "\n",
        (output.bar(share, max(10, min(40, width - 40))), "green"),
        f" {share:.0%}  step {progress.step} of {progress.steps}",
    )
    left_s = remaining_s(seen, points)
    if left_s is not None:
        text.append(f", {output.brief(left_s)} left")
    text.append(f"\nloss {output.number(progress.loss, '.4f')}")
    losses = [y for _, y in plots.finite([(one.step, _loss(one)) for one in points])]
    if losses:
        text.append(f"  {plots.spark(losses, max(10, min(60, width - 20)))}", style="cyan")
    text.append(
        f"\n{output.number(progress.tokens_per_second, ',.0f')} tokens/s, attempt "
        f"{progress.attempt}, {progress.incidents} incidents, {output.age(seen.created_at)} old"
    )
    if seen.waiting is not None:
        text.append(f"\nwaits for {seen.waiting.resource}: {seen.waiting.reason}", style="yellow")
    if seen.outcome is not None:
        text.append(f"\n{seen.outcome.code}: {seen.outcome.message}")
    return text


def _job_row(prefix: str, seen: JobView, now: float) -> list[str | Text]:
    progress = seen.progress
    share = progress.step / max(1, progress.steps)
    return [
        prefix,
        seen.name,
        output.state_text(seen.state),
        Text(output.bar(share, BAR), style="green"),
        f"{progress.step}/{progress.steps}",
        output.number(progress.loss, ".4f"),
        output.count(progress.tokens_per_second if seen.state is State.RUNNING else None),
        str(progress.incidents),
        output.brief(now - seen.created_at),
    ]


def _incident(one: IncidentView) -> Text:
    over = one.closed_at is not None
    total_s = one.phases_s.get("total")
    took = f", {output.seconds(total_s)}" if over and total_s is not None else ""
    return Text.assemble(
        (f"  {output.clock(one.opened_at)} ", "dim"),
        (one.cause, "" if over else "yellow"),
        f": {one.decision or 'not decided yet'}{took}" + ("" if over else " (open)"),
    )


def _loss(point: MetricPoint) -> float | None:
    value = point.values.get("loss")
    return None if value is None or isinstance(value, str) else float(value)
