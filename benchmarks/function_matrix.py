"""Users' functions against the same training in torch alone: the losses of each kind of model.

    python -m benchmarks.function_matrix --json [--divisions N] [--parts N] [--meshes N]

Each combination of a way to divide a model, a part that models have and a mesh trains five steps
from the same seed in torch and as a function; the function trains once more, with a rank killed in
its third step. Either the losses are those of torch, and the bits after the kill those without it,
or the function is refused in a sentence. A difference is of losses of about 1.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.support.ranks import function_programs
from tests.support.ranks.function_cases import DIVISIONS, FUNCTION, PARTS, in_torch
from tests.support.ranks.rank_worlds import Worlds, world_of

from benchmarks.conditions import describe_mesh, machine, print_json, report
from holdfast_workers.functions import FunctionError
from holdfast_workers.spec import TrainingSpec

MESHES: tuple[Mapping[str, int], ...] = (
    {"dp_shard": 2},
    {"dp_replicate": 2},
    {"dp_replicate": 2, "dp_shard": 2},
)
STEPS, KILLED_IN = 5, 3
TOLERANCE = 1e-5


@dataclass(frozen=True)
class CaseResult:
    """One combination."""

    division: str
    part: str
    mesh: str
    difference: float = 0.0
    """The largest between the losses of a step."""
    same_bits: bool = True
    """Whether the run with the killed rank has the digests of the calm one."""
    refused: str = ""
    """The sentence with which the function is refused, if it is."""

    @property
    def is_right(self) -> bool:
        return bool(self.refused) or (self.difference < TOLERANCE and self.same_bits)


@dataclass(frozen=True)
class FunctionMatrixResult:
    """The last line."""

    cases: int
    refused: int
    wrong: int
    largest_difference: float


def case_spec(division: str, part: str, mesh: Mapping[str, int]) -> TrainingSpec:
    """Four micro-batches a step on two data-parallel ranks, two on four."""
    tensor_parallel = {"tp": 2} if division == "tp by hand" else {}
    return TrainingSpec.model_validate(
        {
            "function": FUNCTION,
            "train": {"steps": STEPS, "global_batch": 16, "micro_batch": 2, "seed": 5},
            "parallel": {**mesh, **tensor_parallel},
            "config": {"division": division, "part": part},
        }
    )


def run_case(worlds: Worlds, division: str, part: str, mesh: Mapping[str, int]) -> CaseResult:
    spec = case_spec(division, part, mesh)
    name = describe_mesh(mesh)
    try:
        calm = worlds.run(function_programs.trained, spec)
    except AssertionError as error:
        refusal = _refusal(str(error))
        if not refusal:
            raise
        return CaseResult(division, part, name, refused=refusal)
    expected = worlds.run(in_torch, spec)[0]
    pairs = zip(calm[0]["losses"], expected, strict=True)
    difference = max(abs(ours - theirs) for ours, theirs in pairs)
    killed = _digests_with_a_kill(worlds, spec)
    same = all(
        digests == {step: calm[0]["digests"][step] for step in digests} and STEPS in digests
        for digests in killed
    )
    return CaseResult(division, part, name, difference, same)


def _digests_with_a_kill(worlds: Worlds, spec: TrainingSpec) -> list[dict[int, str]]:
    """Of the survivors, and of the process that replaces the killed one."""
    attempt, last = worlds.next_attempt(), spec.parallel.world_size - 1
    with tempfile.TemporaryDirectory() as folder:
        states = Path(folder)
        started = [
            worlds.start(
                function_programs.survivor,
                world_of(spec, rank, attempt),
                spec,
                states,
                KILLED_IN,
                False,
            )
            for rank in range(last + 1)
        ]
        started[last].process.join(60)
        replacement = worlds.start(
            function_programs.trained,
            world_of(spec, last, attempt + 1000),
            spec,
            states,
            KILLED_IN - 1,
        )
        ranks = [*started[:last], replacement]
        return [rank.result()["digests"] for rank in ranks]


def _refusal(trace: str) -> str:
    """The sentence of a refusal in a traceback; empty: it is another failure."""
    mark = f"{FunctionError.__name__}: "
    last = trace.strip().splitlines()[-1]
    return last.partition(mark)[2] if mark in last else ""


def table(results: list[CaseResult]) -> str:
    """Markdown: a row per part, a column per division; the meshes of a cell together."""
    divisions = list(dict.fromkeys(each.division for each in results))
    lines = [
        "| Model | " + " | ".join(divisions) + " |",
        "|---|" + "---|" * len(divisions),
    ]
    for part in dict.fromkeys(each.part for each in results):
        cells = [
            _cell([r for r in results if (r.part, r.division) == (part, division)])
            for division in divisions
        ]
        lines.append(f"| {part} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(results: list[CaseResult]) -> str:
    if any(not each.is_right for each in results):
        return "**wrong**"
    if any(each.refused for each in results):
        return "refused"
    return f"{max(each.difference for each in results):.0e}"


def measure(divisions: int, parts: int, meshes: int) -> FunctionMatrixResult:
    with tempfile.TemporaryDirectory() as folder:
        worlds = Worlds(Path(folder))
        results = []
        for division in DIVISIONS[:divisions]:
            for part in PARTS[:parts]:
                for mesh in MESHES[:meshes]:
                    results.append(run_case(worlds, division, part, mesh))
                    report(f"{results[-1]}")
    report(table(results))
    for sentence in dict.fromkeys(each.refused for each in results if each.refused):
        report(f"refused: {sentence}")
    return FunctionMatrixResult(
        cases=len(results),
        refused=sum(bool(each.refused) for each in results),
        wrong=sum(not each.is_right for each in results),
        largest_difference=max(each.difference for each in results),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--divisions", type=int, default=len(DIVISIONS))
    parser.add_argument("--parts", type=int, default=len(PARTS))
    parser.add_argument("--meshes", type=int, default=len(MESHES))
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    report(str(machine()))
    result = measure(arguments.divisions, arguments.parts, arguments.meshes)
    if arguments.json:
        print_json(result)
    sys.exit(1 if result.wrong else 0)


if __name__ == "__main__":
    main()
