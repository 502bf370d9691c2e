"""The sentences about an incident: the fault, the losses, the decision, the costs. Pure.

Promises: an incident of every cause is described in whole sentences, as the command line and the
dashboard show them; a cause, tier or phase that this version does not know is tolerated; a boolean
appears as words, and only if it is true. Node ids are whole, and no sentence has a time of day.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from holdfast_service.job_model.program_levels import ProgramLevel
from holdfast_service.policy.causes import Cause
from holdfast_service.policy.incident_parts import LostItem, SharedStack, SuspectedRank
from holdfast_service.views.cause_words import cause_words
from holdfast_service.views.incident_facts import (
    END_SENTENCES,
    RESTORE_SENTENCES,
    chosen,
    facts_of,
    known_by,
)
from holdfast_service.views.incidents import (
    BudgetView,
    IncidentSentence,
    IncidentView,
    SentenceSubject,
)
from holdfast_service.wording import (
    duration,
    enumeration,
    mesh_text,
    plural,
    ranks_text,
    sentence,
)

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
    "detect": "the report of the fault",
    "gather": "gathering faults",
    "fence": "fencing",
    "decide": "the decision",
    "form": "forming the next attempt",
    "restore": "the restore",
    "first_step": "the first step",
    "outage": "the outage",
}
"""The phases of an incident in their order; `total` is their sum. What the goodput account calls
detection, from the last finished step to the first signal, is before them."""
OF_PROGRAM = {**PHASES, "first_step": "the start of the program"}
"""The same of a program, which starts again, and loads its state by itself."""
SHOWN_FRAMES = 6
LEAST_S = 0.0005
"""A shorter phase would read as 0 ms."""


def incident_title(incident: IncidentView) -> str:
    """`a node was lost`; of a resize, `the world grew from 6 to 8 ranks`."""
    change = incident.mesh_change
    if incident.cause == Cause.RESIZE and change is not None:
        before, after = change.ranks_before, change.ranks_after
        if before == after:
            return f"the {after} ranks formed another mesh"
        return f"the world {'grew' if after > before else 'shrank'} from {before} to {after} ranks"
    return cause_words(incident.cause).clause


def incident_text(incident: IncidentView) -> Iterator[IncidentSentence]:
    """The sentences of the incident, in the order in which they are read."""
    subject = SentenceSubject
    described: Mapping[SentenceSubject, Iterable[str]] = {
        subject.LOSS: _loss_sentences(incident),
        subject.EVIDENCE: (sentence(f"Evidence: {item}") for item in incident.evidence),
        subject.SUSPECT: map(suspect_sentence, incident.suspects),
        subject.STACK: map(stack_sentence, incident.stacks),
        subject.EARLIER: _earlier_sentences(incident),
        subject.DECISION: _decision_sentences(incident),
        subject.MESH: _mesh_sentences(incident),
        subject.REFUSED: _refused_sentences(incident),
        subject.BUDGET: [] if incident.budget is None else [budget_sentence(incident.budget)],
        subject.RESTORE: _restore_sentences(incident),
        subject.PHASES: _phase_sentences(incident),
        subject.END: _end_sentences(incident),
    }
    for about in SentenceSubject:
        for text in described[about]:
            yield IncidentSentence(about=about, text=text)


def lost_sentence(item: LostItem, incident: IncidentView) -> str:
    """`Ranks 4 to 7 on agent n1 were lost.`, from one item of `lost`."""
    ranks = ranks_of(item)
    where = f" on agent {item.agent}" if item.agent else ""
    if ranks:
        subject, several = f"{ranks_text(ranks)}{where}", len(ranks) > 1
        if item.worker:
            subject += f" (process {item.worker})"
    elif item.worker:
        subject, several = f"process {item.worker}{where}", False
    elif item.agent:
        subject, several = f"agent {item.agent}", False
    else:
        subject, several = "no particular rank", False
    verb = "lost" if item.cause in PROCESS_LOSING else "affected"
    text = f"{subject} {'were' if several else 'was'} {verb}"
    if item.attempt not in (None, incident.attempt):
        text += f" in attempt {item.attempt}"
    if item.on_notice:
        text += ", after the cluster had announced the removal of the node"
    if item.cause and item.cause != incident.cause:
        text += f": {cause_words(item.cause).clause}"
    return sentence(text)


def suspect_sentence(suspect: SuspectedRank) -> str:
    """`Rank 3 on agent n1 is suspected with a score of 0.90: 3 ranks wait for it.`"""
    where = f" on agent {suspect.agent}" if suspect.agent else ""
    where += f" (node {suspect.node_id})" if suspect.node_id else ""
    how = f"rank {suspect.rank}{where} is suspected with a score of {suspect.score:.2f}"
    return sentence(": ".join([how, *(["; ".join(suspect.reasons)] if suspect.reasons else [])]))


def stack_sentence(stack: SharedStack) -> str:
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
        f"within {duration(budget.window_s)}"
    )
    if budget.without_progress:
        count = budget.without_progress
        attempts = "the last attempt" if count == 1 else f"the last {count} attempts"
        text += (
            f"; {attempts} made no new step, and {budget.max_without_progress} such attempts "
            "in a row are allowed"
        )
    return sentence(text)


def tiers_text(of_rank: Mapping[str, str]) -> str:
    """`own RAM (ranks 0 to 2); a partner's RAM (rank 3)`."""
    ranks: dict[str, list[int]] = {}
    for rank, tier in of_rank.items():
        ranks.setdefault(tier, []).append(int(rank))
    ordered = sorted(ranks.items(), key=lambda group: min(group[1]))
    return "; ".join(f"{TIER_NAMES.get(tier, tier)} ({ranks_text(held)})" for tier, held in ordered)


def ranks_of(item: LostItem) -> Sequence[int]:
    """The ranks of one item of `lost`; none if it has none."""
    return item.ranks or (() if item.rank is None else (item.rank,))


def _loss_sentences(incident: IncidentView) -> Iterator[str]:
    """The sentences on what was lost; none for a resize, which loses nothing."""
    for item in incident.lost:
        if item.cause != Cause.RESIZE:
            yield lost_sentence(item, incident)


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


def _refused_sentences(incident: IncidentView) -> list[str]:
    return [
        sentence(f"The alternative '{other.decision}' was refused: {other.why}")
        for other in incident.refused
    ]


def _restore_sentences(incident: IncidentView) -> Iterator[str]:
    steps = incident.steps_lost or 0
    values = {
        "restored_step": incident.restored_step,
        "lost": f"{plural(steps, 'step')} {'was' if steps == 1 else 'were'}",
        "cost": incident.cost,
        "tiers": tiers_text(incident.tiers),
        "known_by": known_by(incident),
    }
    facts = facts_of(incident, tiers=bool(incident.tiers), cost=bool(incident.cost))
    return chosen(RESTORE_SENTENCES, facts, values)


def _phase_sentences(incident: IncidentView) -> Iterator[str]:
    """`The recovery took 32 ms: 2 ms for the decision and 30 ms for the restore.`; none without
    a measurement."""
    phases_s = incident.phases_s
    names = OF_PROGRAM if incident.level < ProgramLevel.CONTEXT else PHASES
    order = [*PHASES, *sorted(set(phases_s) - set(PHASES) - {"total"})]
    parts = [
        f"{duration(value)} for {names.get(name, name.replace('_', ' '))}"
        for name in order
        if (value := phases_s.get(name)) is not None and value >= LEAST_S
    ]
    total = phases_s.get("total")
    if total is not None:
        yield f"The recovery took {duration(total)}" + (
            f": {enumeration(parts)}." if parts else "."
        )
    elif parts:
        yield f"The recovery has taken {enumeration(parts)} so far."


def _end_sentences(incident: IncidentView) -> Iterator[str]:
    if incident.resolution or incident.closed_at is None:
        resolution = (incident.resolution or "").rstrip(".")
        yield from chosen(END_SENTENCES, facts_of(incident), {"resolution": resolution})


def _earlier_sentences(incident: IncidentView) -> Iterator[str]:
    """What was decided before a further fault; the present decision follows it."""
    for before in incident.earlier:
        because = f", because {before.reason}" if before.reason else ""
        cause = cause_words(before.cause).clause
        several = before.next_attempt > before.attempt + 1
        failed = f"{'each attempt up to' if several else 'attempt'} {before.next_attempt}"
        yield sentence(
            f"After attempt {before.attempt} ({cause}), the decision was to {before.decision}"
            f"{because}; {failed} then failed too"
        )
