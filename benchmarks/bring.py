"""Training downtime of programs that users bring, after a rank is killed: stock against Holdfast.

    python -m benchmarks.bring --json [--kills N]

The same file runs on both sides, on two ranks: a DDP script with its own checkpoint file under
torchrun and as a job with `script`, and a Ray Train function under Ray Train and as a job with
`ray_train`, with checkpoints on disk (level 0) and in memory too (level 2). Measured are the
seconds from SIGKILL of a rank to the first step beyond every step that was made before it. Each
side runs once, and its ranks are killed in turn.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

from benchmarks import holdfast_side, ray_train_side
from benchmarks.brought import holdfast_sides, stock_sides
from benchmarks.conditions import (
    parser,
    print_json,
    report,
    report_conditions,
)
from benchmarks.figures import MeasuredFault, SideFigures, side_figures
from benchmarks.step_files import StepFiles

RANKS = 2
RAY_TRAIN = "ray_train_"
Side = Callable[[], AbstractContextManager[StepFiles]]
HOLDFAST: dict[str, Callable[..., AbstractContextManager[StepFiles]]] = {
    "holdfast_script": holdfast_sides.script,
    "holdfast_ray_level0": partial(holdfast_sides.ray_train, level=0),
    "holdfast_ray_level2": partial(holdfast_sides.ray_train, level=2),
}
DEFAULT_SIDES = ("torchrun", f"{RAY_TRAIN}{ray_train_side.BEST.name}", *HOLDFAST)


@dataclass(frozen=True)
class BringResult:
    """The last line: each side, and the ratios of the medians, stock to Holdfast. None: left out.

    Of Ray Train's settings the faster one counts.
    """

    ray_train_level2_ratio: float | None
    ray_train_level0_ratio: float | None
    torchrun_level0_ratio: float | None
    sides: dict[str, SideFigures]


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    report_conditions()
    report(
        f"{RANKS} ranks, a network of width {stock_sides.WIDTH}, a checkpoint every "
        f"{stock_sides.EVERY} steps; {options.kills} kills per side"
    )
    faults = {name: _measure(name, side, options) for name, side in _stock(options.sides).items()}
    if any(name in options.sides for name in HOLDFAST):
        with holdfast_side.serving(RANKS) as server:
            for name in (name for name in HOLDFAST if name in options.sides):
                faults[name] = _measure(name, partial(HOLDFAST[name], server, RANKS), options)
    result = _result(faults)
    if options.json:
        print_json(result)
    return 0


def _stock(names: list[str]) -> dict[str, Side]:
    sides: dict[str, Side] = {"torchrun": partial(stock_sides.torchrun, RANKS)}
    for setting in ray_train_side.SETTINGS:
        sides[f"{RAY_TRAIN}{setting.name}"] = partial(stock_sides.ray_train, RANKS, setting)
    return {name: side for name, side in sides.items() if name in names}


def _measure(name: str, side: Side, options: argparse.Namespace) -> list[MeasuredFault]:
    report(name)
    with side() as files:
        victims = [number % RANKS for number in range(options.kills)]
        return files.measure(victims, RANKS, options.steps_between)


def _result(faults: dict[str, list[MeasuredFault]]) -> BringResult:
    sides = {name: side_figures(found) for name, found in faults.items()}
    for name, figures in sides.items():
        report(f"{name}: {figures}")
    medians = {name: figures.median_s for name, figures in sides.items()}
    ray_train = [medians[name] for name in medians if name.startswith(RAY_TRAIN)]
    best = min(ray_train, default=None)
    return BringResult(
        ray_train_level2_ratio=_ratio(best, medians.get("holdfast_ray_level2")),
        ray_train_level0_ratio=_ratio(best, medians.get("holdfast_ray_level0")),
        torchrun_level0_ratio=_ratio(medians.get("torchrun"), medians.get("holdfast_script")),
        sides=sides,
    )


def _ratio(stock_s: float | None, holdfast_s: float | None) -> float | None:
    return None if stock_s is None or holdfast_s is None else round(stock_s / holdfast_s, 2)


def _options(arguments: list[str] | None) -> argparse.Namespace:
    options = parser("bring", __doc__)
    options.add_argument("--kills", type=int, default=3, help="per side; default 3")
    options.add_argument(
        "--steps-between", type=int, default=12, help="steps between two kills; default 12"
    )
    stock = ("torchrun", *(f"{RAY_TRAIN}{setting.name}" for setting in ray_train_side.SETTINGS))
    options.add_argument(
        "--sides",
        nargs="+",
        default=list(DEFAULT_SIDES),
        choices=[*stock, *HOLDFAST],
        help=f"default: {' '.join(DEFAULT_SIDES)}",
    )
    return options.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
