"""The sentences that people read about an incident: the fault, the losses, the decision, the costs.
Pure: neither I/O nor a clock.

Promises: an incident of every cause renders as whole sentences; a cause, tier or key that this
version does not know is tolerated (a newer server may send it); a boolean appears as words, and
only if it is true; node ids are cut by the shortener that is passed in; the refused alternatives
are counted, and listed only on request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from holdfast.cli.printing import output
from holdfast_service.views.incidents import (
    BudgetView,
    IncidentView,
    LostView,
    StackView,
    SuspectView,
)

CAUSE_SENTENCES = {
    "node_lost": "a node was lost",
    "preempted": "the cluster took away a node or a process",
    "node_unwell": "a health probe found a node unfit for training",
    "agent_lost": "an agent was lost",
    "out_of_memory": "the kernel killed a process because memory ran out",
    "worker_crash": "the process of a rank ended unexpectedly",
    "corruption": "a rank computed other bits than its replicas",
    "hang": "a rank stopped making progress",
    "user_error": "the training program raised an error",
    "bad_state": "a saved state could not be loaded",
    "not_finite": "the first step after a restore was not finite",
    "guard": "the loss or the gradients were out of bounds",
    "checkpoint_failed": "a shard of the last checkpoint could not be written",
    "internal_error": "an internal error of Holdfast occurred",
    "no_progress": "an attempt did not reach its first step in time",
    "straggler": "a rank computed more slowly than its peers",
    "restore_unavailable": "the remote storage did not answer during a restore",
    "remote_unavailable": "the remote storage accepted no checkpoint",
    "resize": "another mesh was due",
    "communication": "ranks lost their connections, and no process was seen to end",
}
"""A sentence for the value of each cause. The keys are text: a newer server may send a cause that
is not in the enum."""
PROCESS_LOSING = frozenset(
    {"node_lost", "agent_lost", "out_of_memory", "worker_crash", "preempted", ""}
)
"""Causes after which the processes of the ranks are gone; the others only affect them."""
TIER_NAMES = {
    "own_ram": "own RAM",
    "partner_ram": "a partner's RAM",
    "reshard": "RAM, from ranks of another mesh",
    "remote": "remote storage",
    "init": "the job's initial state",
}
PHASES = {
    "detect": "the detection",
    "gather": "gathering faults",
    "fence": "fencing",
    "decide": "the decision",
    "form": "forming the next attempt",
    "restore": "the restore",
    "first_step": "the first step",
    "outage": "the outage",
}
"""The phases of an incident in their order; `total` is their sum."""
SHOWN_FRAMES = 6
SHOWN_RANGES = 8

Shortener = Callable[[str], str]
"""Cuts the node ids in a text, such as `output.NodeIdShortener`."""


def incident_heading(incident: IncidentView) -> str:
    """What follows `Incident 2`: ` at 12:00:01 in attempt 1: a node was lost (node_lost).`"""
    clock = output.clock(incident.opened_at)
    return (
        f" at {clock} in attempt {incident.attempt}: "
        f"{cause_sentence(incident.cause)} ({incident.cause})."
    )


def incident_sentences(
    incident: IncidentView, shorten: Shortener, *, alternatives: bool = False
) -> list[str]:
    """The incident after its heading, a paragraph an item. `alternatives`: list the refused."""
    paragraphs = [
        *(lost_sentence(item, incident) for item in incident.lost if item.cause != "resize"),
        *(sentence(f"Evidence: {item}") for item in incident.evidence),
        *map(suspect_sentence, incident.suspects),
        *map(stack_sentence, incident.stacks),
        *_decision_sentences(incident),
        *_mesh_sentences(incident),
        *_refused_sentences(incident, alternatives),
    ]
    if incident.budget is not None:
        paragraphs.append(budget_sentence(incident.budget))
    if incident.restored_step is not None:
        paragraphs.append(_restore_sentence(incident))
    if incident.tiers:
        paragraphs.append(f"The state came from {tiers_text(incident.tiers)}.")
    if times := phase_times_sentence(incident.phases_s):
        paragraphs.append(times)
    if incident.resolution:
        paragraphs.append(sentence(f"The incident is closed: {incident.resolution}"))
    elif incident.closed_at is None:
        paragraphs.append("The incident is still open.")
    return [shorten(paragraph) for paragraph in paragraphs]


def mesh_text(mesh: Mapping[str, int]) -> str:
    """`dp_shard 4 × tp 2`."""
    return " × ".join(f"{axis} {size}" for axis, size in mesh.items())


def cause_sentence(cause: str) -> str:
    """`a node was lost`; an unknown cause as its own name."""
    return CAUSE_SENTENCES.get(cause, cause.replace("_", " ") or "an unknown fault occurred")


def lost_sentence(item: LostView, incident: IncidentView) -> str:
    """`Ranks 4 to 7 on agent n1 were lost.`, from one item of `lost`."""
    ranks = ranks_of(item)
    where = f" on agent {item.agent}" if item.agent else ""
    if ranks:
        subject, plural = f"{ranks_text(ranks)}{where}", len(ranks) > 1
        if item.worker:
            subject += f" (process {item.worker})"
    elif item.worker:
        subject, plural = f"process {item.worker}{where}", False
    elif item.agent:
        subject, plural = f"agent {item.agent}", False
    else:
        subject, plural = "no particular rank", False
    verb = "lost" if item.cause in PROCESS_LOSING else "affected"
    text = f"{subject} {'were' if plural else 'was'} {verb}"
    if item.attempt not in (None, incident.attempt):
        text += f" in attempt {item.attempt}"
    if item.on_notice:
        text += ", after the cluster had announced the removal of the node"
    if item.cause and item.cause != incident.cause:
        text += f": {cause_sentence(item.cause)}"
    return sentence(text)


def suspect_sentence(suspect: SuspectView) -> str:
    """`Rank 3 on agent n1 is suspected with a score of 0.90: 3 ranks wait for it.`"""
    where = f" on agent {suspect.agent}" if suspect.agent else ""
    where += f" (node {suspect.node_id})" if suspect.node_id else ""
    how = f"rank {suspect.rank}{where} is suspected with a score of {suspect.score:.2f}"
    return sentence(": ".join([how, *(["; ".join(suspect.reasons)] if suspect.reasons else [])]))


def stack_sentence(stack: StackView) -> str:
    """`Ranks 0 and 1 were in all_reduce (...), called from forward (...).`; all frames over
    REST."""
    subject, verb = ranks_text(stack.ranks), "were" if len(stack.ranks) > 1 else "was"
    hidden = len(stack.frames) - SHOWN_FRAMES
    if not stack.frames:
        return sentence(f"{subject} {verb} at an unknown place")
    more = f", and {hidden} more" if hidden > 0 else ""
    shown = ", called from ".join(stack.frames[:SHOWN_FRAMES])
    return sentence(f"{subject} {verb} in {shown}{more}")


def budget_sentence(budget: BudgetView) -> str:
    """`The failure budget has 19 of 20 failures left within 1 h 0 min.`, with the attempts without
    progress."""
    text = (
        f"The failure budget has {budget.failures_left} of {budget.max_failures} failures left "
        f"within {output.seconds(budget.window_s)}"
    )
    if budget.without_progress:
        count = budget.without_progress
        attempts = "the last attempt" if count == 1 else f"the last {count} attempts"
        text += (
            f"; {attempts} made no new step, and {budget.max_without_progress} such attempts "
            "in a row are allowed"
        )
    return sentence(text)


def phase_times_sentence(phases_s: Mapping[str, float | None]) -> str:
    """`The recovery took 32 ms: 2 ms for the detection and 30 ms for the restore.`; empty without
    a measurement."""
    order = [*PHASES, *sorted(set(phases_s) - set(PHASES) - {"total"})]
    parts = [
        f"{_duration(value)} for {PHASES.get(name, name.replace('_', ' '))}"
        for name in order
        if (value := phases_s.get(name)) is not None
    ]
    total = phases_s.get("total")
    if total is None:
        return f"The recovery has taken {_enumeration(parts)} so far." if parts else ""
    return f"The recovery took {_duration(total)}" + (f": {_enumeration(parts)}." if parts else ".")


def tiers_text(of_rank: Mapping[str, str]) -> str:
    """`own RAM (ranks 0 to 2); a partner's RAM (rank 3)`."""
    ranks: dict[str, list[int]] = {}
    for rank, tier in of_rank.items():
        ranks.setdefault(tier, []).append(int(rank))
    ordered = sorted(ranks.items(), key=lambda group: min(group[1]))
    return "; ".join(f"{TIER_NAMES.get(tier, tier)} ({ranks_text(held)})" for tier, held in ordered)


def ranks_of(item: LostView) -> Sequence[int]:
    """The ranks of one item of `lost`; none if it has none."""
    return item.ranks or (() if item.rank is None else (item.rank,))


def ranks_text(ranks: Iterable[int]) -> str:
    """`rank 3`, `ranks 0 and 1`, `ranks 0 to 7, 12 and 16 to 23`."""
    numbers = sorted(set(ranks))
    ranges: list[list[int]] = []
    for rank in numbers:
        if ranges and rank == ranges[-1][-1] + 1:
            ranges[-1].append(rank)
        else:
            ranges.append([rank])
    parts: list[str] = []
    for run in ranges:
        parts += [f"{run[0]} to {run[-1]}"] if len(run) > 2 else map(str, run)
    if len(parts) > SHOWN_RANGES:
        parts = [*parts[: SHOWN_RANGES - 1], f"others ({len(numbers)} in all)"]
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {_enumeration(parts)}"


def sentence(text: str) -> str:
    """Starts with a capital letter, unless the first word is an identifier, and ends with a full
    stop."""
    stripped = " ".join(text.split())
    first, _, _ = stripped.partition(" ")
    capital = stripped[:1].upper() if first.isalpha() and first.islower() else stripped[:1]
    end = "" if stripped.endswith((".", "!", "?")) else "."
    return f"{capital}{stripped[1:]}{end}"


def _decision_sentences(incident: IncidentView) -> list[str]:
    if not incident.decision:
        return ["No decision has been made yet."] if incident.closed_at is None else []
    reason = f", because {incident.reason}" if incident.reason else ""
    return [sentence(f"The decision was to {incident.decision}{reason}")]


def _mesh_sentences(incident: IncidentView) -> list[str]:
    change = incident.mesh_change
    if change is None:
        return []
    before, after = mesh_text(change.before), mesh_text(change.after)
    return [
        f"The mesh changed from {before} ({change.ranks_before} ranks) to {after} "
        f"({change.ranks_after} ranks)."
    ]


def _refused_sentences(incident: IncidentView, listed: bool) -> list[str]:
    if not incident.refused:
        return []
    if listed:
        return [
            sentence(f"The alternative '{other.decision}' was refused: {other.why}")
            for other in incident.refused
        ]
    count = output.plural(len(incident.refused), "alternative")
    verb = "was" if len(incident.refused) == 1 else "were"
    command = f"holdfast incidents JOB {incident.number} --alternatives"
    return [f"{count} {verb} refused; `{command}` lists them."]


def _restore_sentence(incident: IncidentView) -> str:
    costs = []
    if incident.steps_lost:
        costs.append(output.plural(incident.steps_lost, "step"))
    costs.append(f"{incident.device_seconds_lost:.1f} device-seconds")
    none_lost = "no step and " if incident.steps_lost == 0 else ""
    return (
        f"Training continued from step {incident.restored_step}; "
        f"the incident cost {none_lost}{' and '.join(costs)}."
    )


def _enumeration(parts: Sequence[str]) -> str:
    return " and ".join([*([", ".join(parts[:-1])] if parts[:-1] else []), *parts[-1:]])


def _duration(value_s: float) -> str:
    return f"{value_s * 1000:.0f} ms" if value_s < 1 else output.seconds(value_s)
