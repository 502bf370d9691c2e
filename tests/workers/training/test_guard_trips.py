"""The handling of a tripped guard, on the real recipe and step loop in one process."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.ranks.rank_worlds import ALONE, RecordingHooks, start_from_seed, tiny_spec
from torch import Tensor, nn

from holdfast_workers.recipes.micro_batches import MicroBatch
from holdfast_workers.recipes.pretrain import PretrainRecipe
from holdfast_workers.spec import GuardsSpec
from holdfast_workers.training.recipe import GuardTripped, NonFiniteStep, World
from holdfast_workers.training.skipped_windows import Ledger
from holdfast_workers.training.step_loop import train

STEPS = 6


class Spoiled(PretrainRecipe):
    """The output of one layer is not finite in the given computations of the given window."""

    window, times = 2, 1

    def build(self, world: World) -> None:
        super().build(world)
        self._reading = -1

        def spoil(module: nn.Module, given: object, output: Tensor) -> Tensor | None:
            if self._reading != self.window or not self.times:
                return None
            self.times -= 1
            return output * float("nan")

        self.model.get_submodule("blocks.0.attention.query").register_forward_hook(spoil)

    def _read(self, step: int, micro_batch_index: int) -> MicroBatch:
        self._reading = self.guard_memory.ledger.window(step)
        return super()._read(step, micro_batch_index)


def begun(cache: Path, times: int, ledger: Ledger = Ledger(), **guards: object) -> Spoiled:  # noqa: B008
    spec = tiny_spec({}, steps=STEPS, dropout=0.1)
    spec = spec.model_copy(update={"guards": GuardsSpec.model_validate(guards)})
    recipe = Spoiled(spec, cache)
    recipe.times = times
    recipe.guard_memory.set_ledger(ledger)
    start_from_seed(recipe)
    return recipe


def ran(recipe: Spoiled, start: int = 0) -> RecordingHooks:
    hooks = RecordingHooks()
    train(recipe, ALONE, recipe.spec, hooks, start)
    return hooks


def test_a_transient_error_changes_no_bit_and_skips_no_data(cache: Path) -> None:
    untouched, once = ran(begun(cache, 0)), ran(begun(cache, 1))
    assert once.digests == untouched.digests
    assert [row.samples for row in once.rows] == [row.samples for row in untouched.rows]
    (trip,) = once.trips
    assert (trip.decision, trip.skipped) == ("retry", None)
    assert (trip.what, trip.micro_batch) == ("loss", 0)


def test_a_reproducible_error_skips_its_window(cache: Path) -> None:
    knew, always = ran(begun(cache, 0, Ledger(((2, 3),)))), ran(begun(cache, 99))
    assert always.digests == knew.digests
    (trip,) = always.trips
    assert (trip.decision, trip.skipped) == ("skip", (2, 3))
    assert (trip.layer, trip.what) == ("blocks.0.attention.query", "output")


def test_a_stop_is_not_retried(cache: Path) -> None:
    with pytest.raises(GuardTripped, match=r"nonfinite at step 3 \(window 2\)"):
        ran(begun(cache, 1, nonfinite={"policy": "stop"}))


def test_an_error_in_the_first_step_after_a_restore_is_blamed_on_the_state(cache: Path) -> None:
    recipe = begun(cache, 0)
    payload = bytearray(recipe.layout().payload_bytes)
    saved = RecordingHooks()
    saved.on_checkpoint = lambda step, source: (
        source.write_state(memoryview(payload), step) if step == 2 else None
    )
    train(recipe, ALONE, recipe.spec, saved, 0)
    restored = begun(cache, 99)
    assert restored.read_state(memoryview(payload)) == 2
    with pytest.raises(NonFiniteStep, match="step 3"):
        ran(restored, 2)


def test_nonfinite_parameters_are_blamed_on_the_state(cache: Path) -> None:
    recipe = begun(cache, 0)
    next(iter(recipe.model.parameters())).data.fill_(float("inf"))
    with pytest.raises(NonFiniteStep, match="in the state of the parameters or moments"):
        ran(recipe)
