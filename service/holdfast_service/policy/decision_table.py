"""The table of decisions in `docs/recovery-policy.md`, from the decision ladder: for every cause
and every combination of known facts and available nodes, the decision and its reason. Pure.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from holdfast_service.policy.causes import Cause
from holdfast_service.policy.decision_ladder import (
    DATA_OUTAGE_S,
    DISTRUST_AFTER,
    Budget,
    Decision,
    Situation,
    decide,
)

Known = dict[str, Any]

DOMAINS: Mapping[str, tuple[object, ...]] = {
    "named": (True, False),
    "node_gone": (False, True),
    "times": (0, 1, DISTRUST_AFTER),
    "repeated": (False, True),
    "may_roll_back": (True, False),
    "data_outage_s": (0.0, DATA_OUTAGE_S),
    "room": (True, False),
    "smaller": (True, False),
}
"""The facts on which a decision can depend, besides the budget, and their distinct values."""

_DEFAULTS: Known = {
    "named": True,
    "node_gone": False,
    "times": 0,
    "repeated": False,
    "may_roll_back": False,
    "data_outage_s": 0.0,
    "smaller": False,
}
"""The values of facts that do not vary for a cause, because they are not in `_VARIABLE_FACTS`."""

_VARIABLE_FACTS: Mapping[Cause, Mapping[str, tuple[object, ...]]] = {
    Cause.PREEMPTED: {"named": (True, False)},
    Cause.NODE_UNWELL: {"named": (False,), "node_gone": (False, True)},
    Cause.OUT_OF_MEMORY: {"repeated": (False, True)},
    Cause.WORKER_CRASH: {"times": (0, 1, DISTRUST_AFTER), "repeated": (False, True)},
    Cause.CORRUPTION: {"times": (1, DISTRUST_AFTER)},
    Cause.HANG: {"times": (1, DISTRUST_AFTER)},
    Cause.USER_ERROR: {"repeated": (False, True)},
    Cause.GUARD: {"may_roll_back": (True, False)},
    Cause.DATA_UNAVAILABLE: {"data_outage_s": (0.0, DATA_OUTAGE_S)},
    Cause.NO_PROGRESS: {"named": (True, False)},
    Cause.STRAGGLER: {"times": (1, DISTRUST_AFTER)},
}

_TEXT: Mapping[tuple[str, object], str] = {
    ("named", True): "a process must be replaced",
    ("named", False): "no process in particular",
    ("node_gone", True): "no rank can run on the node",
    ("node_gone", False): "ranks can run on the node",
    ("times", 0): "the node is not to blame",
    ("times", 1): "the node is to blame for the first time",
    ("times", DISTRUST_AFTER): "the node is to blame again",
    ("repeated", True): "the same fault at the same step before, and no step since; or a "
    "module is missing in the first attempt",
    ("repeated", False): "it is new",
    ("may_roll_back", True): "the ranks agreed which data to skip",
    ("may_roll_back", False): "no data may be skipped",
    ("data_outage_s", 0.0): "for less than 4 h without a step",
    ("data_outage_s", DATA_OUTAGE_S): "for 4 h without a step",
    ("room", True): "another node is ready",
    ("room", False): "no other node is ready",
    ("smaller", True): "a smaller mesh has room",
    ("smaller", False): "no smaller mesh has room",
}

_EXCEEDED_BUDGETS = (
    ("more failures within the window than allowed", Budget(failures=21)),
    ("more preemptions within the window than allowed", Budget(preemptions=101)),
    ("more attempts in a row without a new step than allowed", Budget(without_progress=6)),
)


def possible_situations(cause: Cause) -> Iterator[Known]:
    """Every combination of facts that is possible with this cause."""
    at_hand = {name: DOMAINS[name] for name in ("room", "smaller")}
    variable = {**_VARIABLE_FACTS.get(cause, {}), **at_hand}
    domains = [variable.get(name, (_DEFAULTS.get(name),)) for name in DOMAINS]
    for values in itertools.product(*domains):
        yield dict(zip(DOMAINS, values, strict=True))


def decision_for(cause: Cause, known: Known, budget: Budget | None = None) -> Decision:
    return decide(Situation(cause, what="...", budget=budget or Budget(), **known))


def rows() -> Iterator[tuple[str, str, str, str, str]]:
    """(cause, known, at hand, decision, reason). Facts without influence are omitted."""
    for cause in Cause:
        groups: dict[tuple[str, str], list[Known]] = {}
        for known in possible_situations(cause):
            decision = decision_for(cause, known)
            action, reason = f"`{decision.action.value}`", decision.reason
            if decision.end is not None:
                action, reason = f"{action}, `{decision.end.code}`", ""
            groups.setdefault((action, reason), []).append(known)
        for (action, reason), members in groups.items():
            for facts in _merged(cause, members):
                at_hand = "; ".join(
                    facts.pop(name) for name in ("room", "smaller") if name in facts
                )
                yield f"`{cause.value}`", "; ".join(facts.values()), at_hand, action, reason


def table() -> str:
    """The table as Markdown."""
    lines = ["| Cause | Known | At hand | Decision | Reason |", "|---|---|---|---|---|"]
    for text, budget in _EXCEEDED_BUDGETS:
        decision = decision_for(Cause.WORKER_CRASH, {**_DEFAULTS, "room": True}, budget)
        assert decision.end is not None
        lines.append(
            f"| any cause that ends an attempt | {text} | | `stop`, `{decision.end.code}` | |"
        )
    lines += [f"|{'|'.join(f' {cell} ' if cell else ' ' for cell in row)}|" for row in rows()]
    return "\n".join(lines)


def _merged(cause: Cause, members: list[Known]) -> list[dict[str, str]]:
    """Merge members that differ in one fact only, to get few rows. A row describes each fact that
    does not have all its possible values."""
    found = [{name: frozenset({known[name]}) for name in DOMAINS} for known in members]
    pair = _mergeable_pair(found)
    while pair is not None:
        first, second, name = pair
        found = [row for row in found if row is not first and row is not second]
        found.append({**first, name: first[name] | second[name]})
        pair = _mergeable_pair(found)
    all_values = {name: {known[name] for known in possible_situations(cause)} for name in DOMAINS}
    return [
        {name: _describe(name, row[name]) for name in DOMAINS if row[name] != all_values[name]}
        for row in found
    ]


Merged = dict[str, frozenset[Any]]


def _mergeable_pair(found: list[Merged]) -> tuple[Merged, Merged, str] | None:
    """Two rows that differ in exactly one fact, and the name of that fact."""
    for first, second in itertools.combinations(found, 2):
        different = [name for name in DOMAINS if first[name] != second[name]]
        if len(different) == 1:
            return first, second, different[0]
    return None


def _describe(name: str, values: frozenset[Any]) -> str:
    return " or ".join(_TEXT[name, value] for value in DOMAINS[name] if value in values)
