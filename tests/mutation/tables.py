"""Mutations and results as text, and as lines of JSON. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence

from tests.mutation.selection import Mutation
from tests.mutation.verdicts import Outcome, Result

_HEADINGS = ("no", "kind", "room", "place", "before -> after")


def mutation_table(mutations: Sequence[Mutation]) -> str:
    return _table([_HEADINGS, *(_cells(mutation) for mutation in mutations)])


def result_table(results: Sequence[Result], limit_s: float) -> str:
    rows = [
        (*_cells(result.mutation), found(result, limit_s), f"{result.seconds:.0f}")
        for result in results
    ]
    return _table([(*_HEADINGS, "caught by", "s"), *rows])


def found(result: Result, limit_s: float) -> str:
    """What was found out, in a few words."""
    verdict = result.verdict
    match verdict.outcome:
        case Outcome.SURVIVED:
            return "survived"
        case Outcome.UNDECIDED:
            return f"no failure in {limit_s:.0f} s"
        case Outcome.CAUGHT:
            remark = f"({verdict.remark})" if verdict.remark else ""
            return " ".join(part for part in (verdict.caught_by, remark) if part)


def survivors(results: Sequence[Result]) -> str:
    left = [result for result in results if result.verdict.outcome is Outcome.SURVIVED]
    undecided = sum(result.verdict.outcome is Outcome.UNDECIDED for result in results)
    lines = [f"{len(left)} of {len(results)} survived; {undecided} had no failure in time"]
    return "\n".join([*lines, *(f"  {name(result.mutation)}" for result in left)])


def name(mutation: Mutation) -> str:
    site = mutation.site
    return f"{mutation.number}. {site.kind} in {_place(mutation)}: {site.description}"


def json_line(result: Result, suite: str, seed: int, commit: str, limit_s: float) -> str:
    mutation, verdict = result.mutation, result.verdict
    return json.dumps(
        {
            "suite": suite,
            "seed": seed,
            "commit": commit,
            "limit_s": limit_s,
            "number": mutation.number,
            "kind": mutation.site.kind,
            "room": mutation.room,
            "path": mutation.path,
            "line": mutation.site.line,
            "before": mutation.site.before,
            "after": mutation.site.after,
            "outcome": verdict.outcome,
            "caught_by": verdict.caught_by,
            "remark": verdict.remark,
            "seconds": round(result.seconds, 1),
        }
    )


def _cells(mutation: Mutation) -> tuple[str, ...]:
    site = mutation.site
    return (
        str(mutation.number),
        site.kind,
        mutation.room,
        _place(mutation),
        site.description,
    )


def _place(mutation: Mutation) -> str:
    return f"{mutation.path}:{mutation.site.line}"


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )
