"""A user's function is protected like a recipe: its state is restored with the same bits."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from tests.support.ranks.rank_worlds import RecordingHooks

from holdfast_workers.functions import FunctionError
from holdfast_workers.functions.function_recipe import FunctionRecipe
from holdfast_workers.recipes import lookup
from holdfast_workers.spec import TrainingSpec
from holdfast_workers.state.layout import StateLayout
from holdfast_workers.training.recipe import GuardTripped, Recipe, World, make_room
from holdfast_workers.training.step_loop import Steps

ALONE = World(0, 1, {"dp_shard": 1, "tp": 1}, 1, "cpu")
STEPS = 9
FUNCTIONS = "tests.support.ranks.functions"


def prepared(name: str, **changes: Any) -> Recipe:
    spec = TrainingSpec.model_validate(
        {
            "function": f"{FUNCTIONS}:{name}",
            "train": {"steps": STEPS, "global_batch": 12, "micro_batch": 4, "seed": 5},
            **changes,
        }
    )
    recipe = lookup.make_recipe(spec, Path("/nonexistent"))
    recipe.prepare()
    recipe.build(ALONE)
    return recipe


def ran(
    recipe: Recipe,
    hooks: RecordingHooks | None = None,
    payload: bytes | None = None,
    layout: StateLayout | None = None,
) -> tuple[RecordingHooks, int]:
    """From the seed, or from the state in `payload`."""
    used = hooks or RecordingHooks()

    def begin() -> Steps:
        recipe.initialize()
        if layout is not None:
            make_room(recipe, layout)
        start = recipe.read_state(memoryview(bytearray(payload))) if payload else 0
        return Steps(recipe, ALONE, recipe.spec, used, start)

    return used, recipe.run(begin)


def saved(name: str) -> tuple[RecordingHooks, dict[int, bytes]]:
    """A whole run, and its state after each step."""
    payloads: dict[int, bytes] = {}

    def keep(step: int, recipe: Recipe) -> None:
        payload = bytearray(recipe.layout().payload_bytes)
        recipe.write_state(memoryview(payload), step)
        payloads[step] = bytes(payload)

    hooks = RecordingHooks()
    hooks.on_checkpoint = keep
    ran(prepared(name), hooks)
    return hooks, payloads


@pytest.mark.parametrize("name", ["everything", "plain", "sharded", "assigns_to_a_buffer"])
def test_a_run_restored_from_any_step_has_the_same_bits(name: str) -> None:
    whole, payloads = saved(name)
    assert sorted(payloads) == list(range(1, STEPS + 1))
    for step in (1, 4, STEPS - 1):
        again, last = ran(prepared(name), payload=payloads[step])
        assert last == STEPS
        assert again.digests == {s: whole.digests[s] for s in range(step, STEPS + 1)}
        assert [row.samples for row in again.rows] == [r.samples for r in whole.rows][step:]


def test_a_state_that_has_outgrown_its_room_is_restored_from_any_step() -> None:
    steps = {"steps": 24, "global_batch": 12, "micro_batch": 4, "seed": 5}
    kept: dict[int, tuple[bytes, StateLayout]] = {}

    def keep(step: int, recipe: Recipe) -> None:
        snapshot = recipe.freeze(step)
        payload = bytearray(snapshot.layout.payload_bytes)
        snapshot.write(memoryview(payload))
        kept[step] = bytes(payload), snapshot.layout

    hooks = RecordingHooks()
    hooks.on_checkpoint = keep
    ran(prepared("grows", train=steps), hooks)
    sizes = [layout.payload_bytes for _, layout in kept.values()]
    assert len(set(sizes)) == 3 and sizes == sorted(sizes)
    for step in (10, 11, 23):
        payload, layout = kept[step]
        again, _ = ran(prepared("grows", train=steps), payload=payload, layout=layout)
        assert again.digests == {s: hooks.digests[s] for s in range(step, 25)}


def test_a_buffer_that_changes_its_shape_is_named() -> None:
    with pytest.raises(FunctionError, match=r"model\.mean was a torch\.float32 buffer of shape"):
        ran(prepared("assigns_to_a_buffer", config={"grows": True}))


def test_only_the_seed_determines_the_run() -> None:
    first, second = ran(prepared("everything"))[0], ran(prepared("everything"))[0]
    other = ran(
        prepared(
            "everything",
            train={"steps": STEPS, "global_batch": 12, "micro_batch": 4, "seed": 6},
        )
    )[0]
    assert first.digests == second.digests
    assert first.digests[STEPS] != other.digests[STEPS]


def test_the_first_step_of_an_optimizer_equals_that_of_a_new_one() -> None:
    """Its state is laid out before the first step, without any effect on that step."""
    hooks, _ = ran(prepared("plain"))
    from tests.support.ranks.functions import POINTS, data

    from holdfast_workers.data.sample_order import micro_batch_positions, samples_at
    from holdfast_workers.training.step_seeds import seed_generators

    x, y = data()
    seed_generators(5, 0, 0, "cpu")
    model = torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.Tanh(), torch.nn.Linear(32, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        total = 0.0
        for index in range(3):
            positions = micro_batch_positions(
                step, index, data_index=0, data_parallel=1, micro_batch=4, global_batch=12
            )
            samples = samples_at(positions, POINTS, 5)
            loss = torch.nn.functional.mse_loss(model(x[samples]), y[samples])
            torch.autograd.backward(loss / 3)
            total += float(loss.detach().double() / 3)
        optimizer.step()
        optimizer.zero_grad()
        assert hooks.rows[step].loss == pytest.approx(total, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("steps_itself", "leave that to the context's step"),
        ("forgets_to_step", "step.. was not called in the iteration of step 1"),
        ("returns_early", "returned after step 3 of 9"),
        ("registers_foreign_parameters", "has a parameter of no registered module"),
        ("has_sparse_gradients", r"the gradient of table\.weight is sparse.*use sparse=False"),
        ("no_such_function", "has no callable 'no_such_function'"),
    ],
)
def test_a_mistake_of_the_user_is_named(name: str, message: str) -> None:
    with pytest.raises(FunctionError, match=message):
        ran(prepared(name))


def test_buffers_that_a_recovery_resets_are_named_in_the_log(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ran(prepared("odd_tensors"))
    line = "WARNING not saved, because they are not persistent: the buffers model.table. A recovery"
    assert line in capsys.readouterr().out
    ran(prepared("everything"))
    assert "not persistent" not in capsys.readouterr().out


def test_an_exception_of_the_user_passes_unchanged() -> None:
    with pytest.raises(KeyError, match="the user's own mistake"):
        ran(prepared("mistaken"))


class Over(Exception):
    pass


class EndsAt(RecordingHooks):
    """The attempt is over just before a step is applied."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self._at = step

    def commit_gate(self, step: int) -> None:
        if step == self._at:
            raise Over


@pytest.mark.slow
def test_no_function_can_delay_the_end_of_its_attempt() -> None:
    """Not even a function that catches every exception; and it can be called again."""
    recipe = prepared("swallows")
    hooks = EndsAt(4)
    with pytest.raises(Over):
        ran(recipe, hooks)
    assert [row.step for row in hooks.rows] == [1, 2, 3]
    recipe.abandon_step()
    recipe.rebind(ALONE)
    assert ran(recipe)[0].digests == ran(prepared("swallows"))[0].digests


def test_a_nonfinite_step_is_left_to_the_next_attempt() -> None:
    whole, _ = ran(prepared("poisoned", config={"bad": []}))
    bad = _samples_of_step(4)
    with pytest.raises(GuardTripped) as tripped:
        ran(prepared("poisoned", config={"bad": bad}))
    report = tripped.value.report
    assert report is not None
    assert (report.step, report.skipped, report.what) == (4, (3, 4), "loss")
    assert math.isfinite(whole.rows[-1].loss)


def _samples_of_step(step: int) -> list[int]:
    from holdfast_workers.data.sample_order import micro_batch_positions, samples_at

    positions = micro_batch_positions(
        step - 1, 0, data_index=0, data_parallel=1, micro_batch=4, global_batch=12
    )
    return [int(sample) for sample in samples_at(positions, 96, 5)]


def test_a_gradient_that_is_not_finite_is_named_with_its_rank_and_parameter() -> None:
    parameters = {"first.weight": torch.ones(2), "second.weight": torch.ones(2)}
    for tensor in parameters.values():
        tensor.grad = torch.ones(2)
    parameters["first.weight"].grad = torch.tensor([1.0, math.inf])
    trained = [(name, tensor, None) for name, tensor in parameters.items()]
    recipe = SimpleNamespace(
        share=None,
        world=SimpleNamespace(rank=3),
        registry=SimpleNamespace(trained=lambda: trained),
    )
    found = FunctionRecipe.observed_nonfinite(cast(FunctionRecipe, recipe))
    assert found is not None
    assert (found.rank, found.layer, found.what) == (3, "first.weight", "gradient")
