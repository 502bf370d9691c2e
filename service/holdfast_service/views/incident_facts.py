"""The facts of an incident, and the sentences that need them. Pure, and light to import.

What a sentence claims is known, or the sentence says that it is not, and which line of the program
would make it known. This table is the only place that decides it, for all levels:

| Fact | Level 0 | Levels 1 and 2 | Level 3 |
|---|---|---|---|
| step that the next attempt went on from | if its output names each | if it reports each | always |
| steps lost | the same | if one was reported before | always |
| tier of the restored state | never | level 2: what was offered to it | always |
| phases `restore`, `first_step` | never; the start of the program | the same | always |
| cost | once closed | once a step of the next attempt is stored | the same |
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

from holdfast_service.job_model.events.incidents import IncidentRecord
from holdfast_service.job_model.program_levels import STEPS_BECOME_KNOWN_BY, ProgramLevel
from holdfast_service.policy.decision_ladder import Action
from holdfast_service.wording import plural


class IncidentFacts(Protocol):
    """What an `IncidentView` and an `IncidentRecord` both have."""

    @property
    def level(self) -> int: ...
    @property
    def decision(self) -> str | None: ...
    @property
    def restored_step(self) -> int | None: ...
    @property
    def steps_lost(self) -> int | None: ...
    @property
    def closed_at(self) -> float | None: ...
    @property
    def end_code(self) -> str | None: ...


class Fact(Enum):
    """A fact that a record of an incident may have, or lack."""

    OWN_LOOP = auto()  # a user's program has the step loop, not Holdfast
    NEXT_RUNS = auto()  # another attempt has started since
    RESTORED_STEP = auto()  # the step that it went on from
    FROM_START = auto()  # that is the beginning
    STEPS_LOST = auto()  # how many steps are computed again
    SOME_LOST = auto()  # that is at least one
    TIERS = auto()  # from which tier Holdfast restored the state, or offered it to a program
    COST = auto()  # the device time that it cost: it is final, and not zero
    OVER = auto()  # it is closed
    JOB_ENDED = auto()  # the job ended with it


def has_all_rows(incident: IncidentRecord, newest: int) -> bool:
    """Whether all rows of steps that the incident's cost depends on are stored: none is stored any
    more after a row of a later attempt. `newest`: the attempt of the newest row; 0: there is none,
    and a program that has shown no step has none to wait for."""
    is_silent = not newest and incident.level < ProgramLevel.CONTEXT
    return is_silent or newest >= incident.next_attempt


def facts_of(
    incident: IncidentFacts, *, tiers: bool = False, cost: bool = False
) -> frozenset[Fact]:
    """The facts that the record has. `tiers`: whether it has tiers; `cost`: a final cost."""
    restored, lost = incident.restored_step, incident.steps_lost
    is_over, ended = incident.closed_at is not None, bool(incident.end_code)
    known: Mapping[Fact, bool] = {
        Fact.OWN_LOOP: incident.level < ProgramLevel.CONTEXT,
        Fact.NEXT_RUNS: is_over and not ended and incident.decision not in WITHOUT_ATTEMPT,
        Fact.RESTORED_STEP: restored is not None,
        Fact.FROM_START: restored is not None and restored <= 0,
        Fact.STEPS_LOST: lost is not None,
        Fact.SOME_LOST: bool(lost),
        Fact.TIERS: tiers,
        Fact.COST: cost,
        Fact.OVER: is_over,
        Fact.JOB_ENDED: ended,
    }
    return frozenset(fact for fact, is_known in known.items() if is_known)


WITHOUT_ATTEMPT = frozenset({Action.IGNORE.value, "", None})
"""Decisions after which no other attempt runs."""


@dataclass(frozen=True)
class FactSentence:
    """A sentence that stands if the record has all of `needs` and none of `lacks`."""

    needs: frozenset[Fact]
    lacks: frozenset[Fact]
    text: str
    """With fields of the incident, and `{lost}`, `{cost}`, `{tiers}` and `{known_by}`."""

    def fits(self, facts: frozenset[Fact]) -> bool:
        return self.needs <= facts and not self.lacks & facts


def _sentence(text: str, *needs: Fact, lacks: tuple[Fact, ...] = ()) -> FactSentence:
    return FactSentence(frozenset(needs), frozenset(lacks), text)


RESTORE_SENTENCES: tuple[FactSentence, ...] = (
    _sentence(
        "The next attempt starts from step {restored_step}.",
        Fact.RESTORED_STEP,
        lacks=(Fact.OWN_LOOP, Fact.OVER),
    ),
    _sentence(
        "The next attempt was to start from step {restored_step}.",
        *(Fact.RESTORED_STEP, Fact.JOB_ENDED),
        lacks=(Fact.OWN_LOOP,),
    ),
    _sentence(
        "Training continued from step {restored_step}.",
        *(Fact.RESTORED_STEP, Fact.NEXT_RUNS),
        lacks=(Fact.OWN_LOOP, Fact.FROM_START),
    ),
    _sentence("Training began again.", *(Fact.FROM_START, Fact.NEXT_RUNS), lacks=(Fact.OWN_LOOP,)),
    _sentence(
        "The program went on from step {restored_step}, as its first step tells.",
        *(Fact.RESTORED_STEP, Fact.OWN_LOOP),
        lacks=(Fact.FROM_START,),
    ),
    _sentence("The program began again, as its first step tells.", Fact.FROM_START, Fact.OWN_LOOP),
    _sentence(
        "The step that the program went on from is not known at this level: {known_by}.",
        *(Fact.NEXT_RUNS, Fact.OWN_LOOP),
        lacks=(Fact.RESTORED_STEP,),
    ),
    _sentence("No step was lost.", *(Fact.STEPS_LOST, Fact.NEXT_RUNS), lacks=(Fact.SOME_LOST,)),
    _sentence("{lost} lost.", Fact.SOME_LOST, Fact.NEXT_RUNS),
    _sentence(
        "How many steps were lost is not known.",
        *(Fact.NEXT_RUNS, Fact.OWN_LOOP),
        lacks=(Fact.STEPS_LOST,),
    ),
    _sentence("The incident cost {cost}.", *(Fact.COST, Fact.STEPS_LOST, Fact.NEXT_RUNS)),
    _sentence(
        "Besides such steps, the incident cost {cost}.",
        *(Fact.COST, Fact.NEXT_RUNS, Fact.OWN_LOOP),
        lacks=(Fact.STEPS_LOST,),
    ),
    _sentence("The incident cost {cost}.", Fact.COST, Fact.JOB_ENDED),
    _sentence("The state came from {tiers}.", Fact.TIERS, Fact.NEXT_RUNS, lacks=(Fact.OWN_LOOP,)),
    _sentence(
        "Holdfast offered the program the state in {tiers}.",
        Fact.TIERS,
        Fact.NEXT_RUNS,
        Fact.OWN_LOOP,
    ),
)
"""In the order in which they are read."""

END_SENTENCES: tuple[FactSentence, ...] = (
    _sentence("The incident is still open.", lacks=(Fact.OVER,)),
    _sentence("The incident was not resolved: {resolution}.", Fact.JOB_ENDED),
    _sentence("The incident is closed: {resolution}.", Fact.OVER, lacks=(Fact.JOB_ENDED,)),
)


def chosen(
    table: tuple[FactSentence, ...], facts: frozenset[Fact], values: Mapping[str, object]
) -> Iterator[str]:
    """The sentences of the table that fit the facts."""
    for each in table:
        if each.fits(facts):
            yield each.text.format(**values)


def lost_clause(incident: IncidentFacts) -> str:
    """`1 step lost`; "" for an incident that ended no attempt."""
    facts = facts_of(incident)
    if incident.steps_lost is not None and Fact.JOB_ENDED not in facts:
        return (
            f"{plural(incident.steps_lost, 'step')} lost"
            if incident.steps_lost
            else "no steps lost"
        )
    return "steps lost: not known" if Fact.NEXT_RUNS in facts else ""


def known_by(incident: IncidentFacts) -> str:
    """What would make the steps known."""
    if incident.level > ProgramLevel.SCRIPT:
        return "it had not been seen to report each of its steps"
    return STEPS_BECOME_KNOWN_BY
