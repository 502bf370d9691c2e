"""The table of decisions in `docs/recovery-policy.md`, made from the ladder: for every cause, what
can be known of it and what can be at hand, what is decided and why.

`python -m holdfast_service.policy.decision_table docs/recovery-policy.md` writes it into that page;
without a page, it is printed. Pure but for that.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from holdfast_service.policy.causes import Cause
from holdfast_service.policy.decision_ladder import AGAIN, Budget, Decision, Situation, decide

BEGIN = "<!-- the ladder, made by holdfast_service.policy.decision_table -->"
END = "<!-- the end of the ladder -->"

Known = dict[str, Any]

DOMAINS: Mapping[str, tuple[object, ...]] = {
    "named": (True, False),
    "node_gone": (False, True),
    "times": (0, 1, AGAIN),
    "repeated": (False, True),
    "may_roll_back": (True, False),
    "room": (True, False),
}
"""What a decision may depend on, the budget apart, and which values differ."""

_ALWAYS: Known = {
    "named": True,
    "node_gone": False,
    "times": 0,
    "repeated": False,
    "may_roll_back": False,
}
"""Of what cannot be otherwise for a cause, if it is not among its `_OPEN`."""

_OPEN: Mapping[Cause, Mapping[str, tuple[object, ...]]] = {
    Cause.PREEMPTED: {"named": (True, False)},
    Cause.NODE_UNWELL: {"named": (False,), "node_gone": (False, True)},
    Cause.OUT_OF_MEMORY: {"repeated": (False, True)},
    Cause.WORKER_CRASH: {"times": (0, 1, AGAIN), "repeated": (False, True)},
    Cause.CORRUPTION: {"times": (1, AGAIN)},
    Cause.HANG: {"times": (1, AGAIN)},
    Cause.USER_ERROR: {"repeated": (False, True)},
    Cause.GUARD: {"may_roll_back": (True, False)},
    Cause.NO_PROGRESS: {"named": (True, False)},
    Cause.STRAGGLER: {"times": (1, AGAIN)},
}

_WORDS: Mapping[tuple[str, object], str] = {
    ("named", True): "a process has to go",
    ("named", False): "no process in particular",
    ("node_gone", True): "no rank can run on the node",
    ("node_gone", False): "ranks can run on the node",
    ("times", 0): "the node is not to blame",
    ("times", 1): "the node is to blame for the first time",
    ("times", AGAIN): "the node is to blame again",
    ("repeated", True): "the same came at the same step before, and no step since",
    ("repeated", False): "it is new",
    ("may_roll_back", True): "the ranks agreed what data to leave out",
    ("may_roll_back", False): "nothing may be left out",
    ("room", True): "another node is ready",
    ("room", False): "no other node is ready",
}

_SPENT = (
    ("more failures within the window than allowed", Budget(failures=21)),
    ("more preemptions within the window than allowed", Budget(preemptions=101)),
    ("more attempts in a row without a new step than allowed", Budget(without_progress=6)),
)


def possible(cause: Cause) -> Iterator[Known]:
    """Every combination of what can be known and at hand when this is the cause."""
    open_ = {**_OPEN.get(cause, {}), "room": DOMAINS["room"]}
    domains = [open_.get(name, (_ALWAYS.get(name),)) for name in DOMAINS]
    for values in itertools.product(*domains):
        yield dict(zip(DOMAINS, values, strict=True))


def decided(cause: Cause, known: Known, budget: Budget | None = None) -> Decision:
    return decide(Situation(cause, what="...", budget=budget or Budget(), **known))


def rows() -> Iterator[tuple[str, str, str, str, str]]:
    """(cause, known, at hand, decision, reason); what decides nothing is left out."""
    for cause in Cause:
        groups: dict[tuple[str, str], list[Known]] = {}
        for known in possible(cause):
            decision = decided(cause, known)
            told, reason = f"`{decision.action.value}`", decision.reason
            if decision.end is not None:
                told, reason = f"{told}, `{decision.end.code}`", ""
            groups.setdefault((told, reason), []).append(known)
        for (told, reason), members in groups.items():
            for one in _merged(cause, members):
                at_hand = one.pop("room", "")
                yield f"`{cause.value}`", "; ".join(one.values()), at_hand, told, reason


def table() -> str:
    """Markdown, from marker to marker."""
    lines = [BEGIN, "", "| Cause | Known | At hand | Decision | Reason |", "|---|---|---|---|---|"]
    for words, budget in _SPENT:
        decision = decided(Cause.WORKER_CRASH, {**_ALWAYS, "room": True}, budget)
        assert decision.end is not None
        lines.append(f"| any that ends an attempt | {words} | | `stop`, `{decision.end.code}` | |")
    lines += [f"|{'|'.join(f' {cell} ' if cell else ' ' for cell in row)}|" for row in rows()]
    return "\n".join([*lines, "", END])


def into(page: str) -> str:
    """The page with the table as it is now. Raises ValueError where a marker is missing."""
    start, stop = page.index(BEGIN), page.index(END) + len(END)
    return page[:start] + table() + page[stop:]


def _merged(cause: Cause, members: list[Known]) -> list[dict[str, str]]:
    """The members as few rows: those that differ in one thing alone become one. A row has words for
    each thing that does not go without saying."""
    found = [{name: frozenset({one[name]}) for name in DOMAINS} for one in members]
    pair = _alike(found)
    while pair is not None:
        one, other, name = pair
        found = [row for row in found if row is not one and row is not other]
        found.append({**one, name: one[name] | other[name]})
        pair = _alike(found)
    everything = {name: {one[name] for one in possible(cause)} for name in DOMAINS}
    return [
        {name: _said(name, row[name]) for name in DOMAINS if row[name] != everything[name]}
        for row in found
    ]


Merged = dict[str, frozenset[Any]]


def _alike(found: list[Merged]) -> tuple[Merged, Merged, str] | None:
    """Two rows that differ in one thing alone, and in which."""
    for one, other in itertools.combinations(found, 2):
        different = [name for name in DOMAINS if one[name] != other[name]]
        if len(different) == 1:
            return one, other, different[0]
    return None


def _said(name: str, values: frozenset[Any]) -> str:
    return " or ".join(_WORDS[name, value] for value in DOMAINS[name] if value in values)


def main(arguments: list[str]) -> None:
    if not arguments:
        print(table())
    for name in arguments:
        page = Path(name)
        page.write_text(into(page.read_text()))


if __name__ == "__main__":
    main(sys.argv[1:])
