"""A script that trains in the steps of a context is a function: same state, same errors."""

from __future__ import annotations

import gc
import sys
import weakref
from pathlib import Path

import pytest
from tests.support.ranks.rank_worlds import RecordingHooks

import holdfast
from holdfast_workers.functions import FunctionError
from holdfast_workers.programs.attachment import NoContext
from holdfast_workers.recipes import lookup
from holdfast_workers.spec import TrainingSpec
from holdfast_workers.training.recipe import Recipe, World
from holdfast_workers.training.step_loop import Steps

ALONE = World(0, 1, {"dp_shard": 1, "tp": 1}, 1, "cpu")
STEPS = 6
SAME_AS_PLAIN = """
import sys

import holdfast
from tests.support.ranks import functions

assert __name__ == "__main__" and sys.argv[1:] == ["--lr", "1"], sys.argv
ctx = holdfast.attach().context
assert holdfast.attach().rank == ctx.rank and holdfast.attach().attempt == ctx.attempt == 1
functions.plain(ctx)
"""


def recipe_of(**keys: object) -> Recipe:
    train = {"steps": STEPS, "global_batch": 12, "micro_batch": 4, "seed": 5}
    spec = TrainingSpec.model_validate({"train": train, **keys})
    recipe = lookup.make_recipe(spec, Path("/nonexistent"))
    recipe.prepare()
    recipe.build(ALONE)
    return recipe


def script(path: Path, text: str, arguments: str = "") -> Recipe:
    path.write_text(text)
    return recipe_of(script=f"{path} {arguments}", program={"context": True})


def run(recipe: Recipe) -> RecordingHooks:
    hooks = RecordingHooks()

    def begin() -> Steps:
        recipe.initialize()
        return Steps(recipe, ALONE, recipe.spec, hooks, 0)

    assert recipe.run(begin) == STEPS
    return hooks


@pytest.mark.seconds
def test_a_script_yields_the_bits_of_the_same_function(tmp_path: Path) -> None:
    function = recipe_of(function="tests.support.ranks.functions:plain")
    losses = [row.loss for row in run(function).rows]
    recipe = script(tmp_path / "train.py", SAME_AS_PLAIN, "--lr 1")
    for _ in range(2):  # as after a fault, in the same process
        assert [row.loss for row in run(recipe).rows] == losses
        recipe.build(ALONE)


@pytest.mark.seconds
def test_what_a_script_made_is_garbage_before_it_runs_again(tmp_path: Path) -> None:
    made: list[weakref.ref[object]] = []
    sys.modules["made_by_the_script"] = made  # type: ignore[assignment]
    try:
        recipe = script(
            tmp_path / "train.py",
            "import sys, weakref, torch, holdfast\n"
            "from tests.support.ranks import functions\n"
            "net = torch.nn.Linear(2, 2)\n"
            "sys.modules['made_by_the_script'].append(weakref.ref(net))\n"
            "functions.plain(holdfast.attach().context)\n",
        )
        before = sys.modules["__main__"], sys.argv
        run(recipe)
        assert (sys.modules["__main__"], sys.argv) == before
        gc.collect()
        assert made and made[0]() is None
    finally:
        del sys.modules["made_by_the_script"]


def test_parts_are_registered_by_the_attachment(tmp_path: Path) -> None:
    recipe = script(
        tmp_path / "train.py",
        "import torch, holdfast\n"
        "model = torch.nn.Linear(2, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "ctx = holdfast.attach().register(model=model, optimizer=optimizer)\n"
        "for step in ctx.steps():\n"
        "    for samples in ctx.batches(10):\n"
        "        ctx.backward(model(torch.ones(len(samples), 2)).square().mean())\n"
        "    ctx.step()\n"
        "raise SystemExit(0)\n",
    )
    assert len(run(recipe).rows) == STEPS


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import sys; sys.exit(3)", "ended with exit status 3"),
        ("pass", "returned before its first step"),
    ],
)
def test_a_script_that_ends_too_early_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "train.py"
    with pytest.raises(FunctionError, match=f"{path} .*{message}"):
        run(script(path, text))


def test_there_is_no_context_after_the_script_nor_elsewhere(tmp_path: Path) -> None:
    run(script(tmp_path / "train.py", SAME_AS_PLAIN, "--lr 1"))
    with pytest.raises(NoContext, match=r"program\.context: true"):
        _ = holdfast.attach().context
