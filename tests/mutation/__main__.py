"""Runs the mutations of a seed against a suite; `tests.mutation` says what to know before."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.mutation import suites, tables
from tests.mutation.rooms import ROOMS, room_sites
from tests.mutation.selection import Mutation, choose
from tests.mutation.trials import (
    CommitMeanwhile,
    UncommittedChanges,
    end_request,
    head,
    require_committed,
    require_untouched,
    try_mutation,
)
from tests.mutation.verdicts import Result, SuiteFault

ROOT = Path(__file__).parents[2]


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    sites = {room: list(room_sites(ROOT, room)) for room in ROOMS}
    mutations = choose(sites, options.count, options.seed)
    if options.only:
        mutations = [mutation for mutation in mutations if mutation.number in options.only]
    print(f"seed {options.seed}: {len(mutations)} of {options.count} mutations", flush=True)
    if options.list:
        print(tables.mutation_table(mutations))
        return 0
    results: list[Result] = []
    try:
        measure(ROOT, mutations, suites.commands(options.suite), options, results)
    except (UncommittedChanges, CommitMeanwhile, SuiteFault, ValueError) as error:
        sys.exit(str(error))
    finally:
        if results:
            print(tables.result_table(results, options.limit_s))
            print(tables.survivors(results), flush=True)
    return 0


def measure(
    root: Path,
    mutations: Sequence[Mutation],
    commands: Sequence[Sequence[str]],
    options: argparse.Namespace,
    results: list[Result],
) -> None:
    """Append a result for each mutation, as soon as it is known, here and to the JSON file."""
    commit = head(root)
    limit_s: float = options.limit_s
    with end_request() as request:
        for mutation in mutations:
            require_committed(root)
            print(f"{tables.name(mutation)} ...", flush=True)
            try:
                result = try_mutation(root, mutation, commands, limit_s, request)
            finally:
                require_untouched(root, commit, mutation)
            results.append(result)
            print(f"    {tables.found(result, limit_s)}, {result.seconds:.0f} s", flush=True)
            if options.json:
                line = tables.json_line(result, options.suite, options.seed, commit, limit_s)
                _append(options.json, line)


def _append(path: Path, line: str) -> None:
    with path.open("a") as file:
        file.write(line + "\n")


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tests.mutation", description=__doc__)
    parser.add_argument("--count", type=int, default=16, help="number of mutations (16)")
    parser.add_argument("--seed", type=int, default=35, help="of the choice (35)")
    parser.add_argument("--list", action="store_true", help="print the mutations, run nothing")
    parser.add_argument(
        "--only", type=int, nargs="+", metavar="NUMBER", help="run these of the list"
    )
    parser.add_argument("--suite", choices=list(suites.SUITES), default="affected")
    parser.add_argument(
        "--limit-s", type=float, default=3600.0, help="for each mutation, in seconds (3600)"
    )
    parser.add_argument(
        "--json", type=Path, metavar="PATH", help="append each result as a line of JSON"
    )
    options = parser.parse_args(arguments)
    if options.count < 1:
        parser.error("--count must be at least 1")
    if unknown := sorted(set(options.only or ()) - set(range(1, options.count + 1))):
        parser.error(f"--only {unknown[0]}: the mutations are 1 to {options.count}")
    return options


if __name__ == "__main__":
    raise SystemExit(main())
