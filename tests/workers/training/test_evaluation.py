"""Evaluation between two steps: the loss of one process on any mesh, and training's bits without
it; a fault in the middle repeats it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.data.token_sets import MadeSet, random_shards
from tests.support.ranks import rank_programs as programs
from tests.support.ranks.rank_worlds import (
    ALONE,
    RecordingHooks,
    Worlds,
    start_from_seed,
    tiny_spec,
)
from tests.support.ranks.world_checks import STOP, assert_replaced, digests_of, rows_of

from holdfast_workers.functions.function_errors import FunctionError
from holdfast_workers.protocol.findings import EarlyStop
from holdfast_workers.protocol.messages import StepRow
from holdfast_workers.recipes.pretrain import PretrainRecipe
from holdfast_workers.spec import (
    DataSpec,
    EarlyStopSpec,
    EvaluateSpec,
    SourceSpec,
    TrainingSpec,
)
from holdfast_workers.spec.train import ValidationSpec
from holdfast_workers.training.evaluation import EVALUATION_PHASE, LOSS, PERPLEXITY
from holdfast_workers.training.recipe import Recipe
from holdfast_workers.training.step_loop import Steps, train

HELD_TOKENS = random_shards(2, [150, 9, 170, 3])
WEB = MadeSet("web", random_shards(1, [275, 140, 134, 12]))
HELD = MadeSet("held", HELD_TOKENS)
LENGTH = 32
FUNCTIONS = "tests.support.ranks.evaluation_functions"


def slow(*values: object) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


def spec_of(
    parallel: Mapping[str, Any],
    every: int = 2,
    batches: int | None = None,
    stop: EarlyStopSpec | None = None,
    function: str | None = None,
    average: bool = False,
    **model: Any,
) -> TrainingSpec:
    data = DataSpec(
        sources=(SourceSpec(path="/web"),),
        prepared=(WEB.prepared(),),
        validation=ValidationSpec(path="/held", prepared=HELD.prepared()),
    )
    function = function and f"{FUNCTIONS}:{function}"
    evaluate = EvaluateSpec(
        every_steps=every,
        batches=batches,
        weights="average" if average else "trained",
        stop=stop,
        function=function,
    )
    spec = tiny_spec(parallel, corpus="unused", **model)
    trains = spec.train.model_copy(update={"ema": 0.5}) if average else spec.train
    return spec.model_copy(update={"data": data, "evaluate": evaluate, "train": trains})


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    for made in (WEB, HELD):
        made.put_into_cache(folder)
    return folder


@pytest.fixture(scope="module")
def worlds(cache: Path) -> Iterator[Worlds]:
    yield Worlds(cache)


def evaluated(rows: list[StepRow]) -> dict[int, float]:
    return {row.step: row.own[LOSS] for row in rows if row.own}


def test_the_loss_is_that_of_every_token_without_dropout(cache: Path) -> None:
    recipe = PretrainRecipe(spec_of({}, dropout=0.5), cache)
    start_from_seed(recipe)
    share = recipe.evaluate(1, lambda name, step, micro_batch=0: None)
    recipe.abandon_step()
    windows = [
        torch.tensor(tokens[start : start + LENGTH + 1])
        for tokens in HELD_TOKENS
        for start in range(0, len(tokens) - 1, LENGTH)
    ]
    assert recipe.model.training
    recipe.model.eval()
    with torch.no_grad():
        losses = [
            F.cross_entropy(recipe.model(each[None, :-1])[0].float(), each[1:], reduction="sum")
            for each in windows
        ]
    assert share.count == share.targets == sum(len(each) - 1 for each in windows)
    assert share.loss_sum == pytest.approx(float(sum(losses)), rel=1e-5)


def test_steps_are_evaluated_at_their_interval_and_the_last_one_too(cache: Path) -> None:
    spec = spec_of({}, every=4, batches=1)
    recipe, hooks = PretrainRecipe(spec, cache), RecordingHooks()
    start_from_seed(recipe)
    train(recipe, ALONE, spec, hooks, 0)
    assert [row.step for row in hooks.rows if row.own] == [4, 6]
    assert {*hooks.rows[3].own} == {LOSS, PERPLEXITY}
    assert hooks.phases.index(("applied", 4)) < hooks.phases.index((EVALUATION_PHASE, 4))
    passes = [step for name, step in hooks.phases if name == EVALUATION_PHASE]
    assert passes == [4] * 4 + [6] * 4


def test_a_step_that_is_forbidden_after_its_evaluation_is_not_committed(cache: Path) -> None:
    """Its attempt may have lost its lease meanwhile."""

    class Fenced(Exception):
        pass

    def on_phase(name: str, step: int) -> None:
        if name == "gate" and (EVALUATION_PHASE, step) in hooks.phases:
            raise Fenced

    spec = spec_of({}, every=4, batches=1)
    recipe, hooks = PretrainRecipe(spec, cache), RecordingHooks(on_phase)
    start_from_seed(recipe)
    saved: list[int] = []
    hooks.on_checkpoint = lambda step, _: saved.append(step)
    with pytest.raises(Fenced):
        train(recipe, ALONE, spec, hooks, 0)
    assert [row.step for row in hooks.rows] == saved == [1, 2, 3]
    recipe.abandon_step()


@pytest.mark.parametrize(
    ("function", "why"),
    [
        ("changing", "must return the same names for every micro-batch"),
        ("own_loss", "'loss' is evaluated by Holdfast itself"),
        ("missing", "has no callable 'missing'"),
        ("listing", "returned a list: it must return sums by name"),
    ],
)
def test_a_function_that_cannot_be_used_is_refused_by_name(
    cache: Path, function: str, why: str
) -> None:
    recipe = PretrainRecipe(spec_of({}, function=function), cache)
    with pytest.raises(FunctionError, match=why):
        start_from_seed(recipe)
        recipe.evaluate(1, lambda name, step, micro_batch=0: None)
    recipe.abandon_step()


def test_a_function_that_changes_its_arguments_changes_no_loss(cache: Path) -> None:
    found = []
    for function in (None, "overwriting"):
        recipe = PretrainRecipe(spec_of({}, function=function), cache)
        start_from_seed(recipe)
        found.append(recipe.evaluate(1, lambda name, step, micro_batch=0: None).loss_sum)
    assert found[0] == found[1]


@pytest.mark.seconds
def test_a_function_that_returns_nothing_on_one_rank_is_an_error_of_the_user(
    worlds: Worlds,
) -> None:
    """A rank without outputs has none, too, and is none at fault."""
    spec = spec_of({"dp_shard": 2}, function="silent_on_one_rank")
    message = "returned \\[\\] on rank 1, and \\['eval_count'\\] on rank 0"
    with pytest.raises(AssertionError, match=f"MetricsDiffer: .*{message}"):
        worlds.run(programs.undisturbed, spec)


@pytest.mark.seconds
def test_a_stage_waits_for_what_it_has_passed_on_before_it_passes_on_more(worlds: Worlds) -> None:
    """Otherwise it keeps what it passes on of all micro-batches of an evaluation."""
    assert worlds.run(programs.sends_at_once, spec_of({"pp": 2})) == [1, 1]
    spec = spec_of({"pp": 2, "schedule": "interleaved"}, layers=4)
    assert max(worlds.run(programs.sends_at_once, spec)) == 2  # one of them is what it receives


def test_a_loss_that_is_not_finite_is_logged_and_no_metric(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def break_it(name: str, step: int) -> None:
        if name == EVALUATION_PHASE:
            next(iter(recipe.local_tensors("parameter").values())).fill_(torch.nan)

    spec = spec_of({}, every=6)
    recipe, hooks = PretrainRecipe(spec, cache), RecordingHooks(break_it)
    start_from_seed(recipe)
    train(recipe, ALONE, spec, hooks, 0)
    assert hooks.rows[-1].own == {}
    assert "the evaluation of step 6: eval_loss, eval_perplexity not finite" in (
        capsys.readouterr().out
    )


def test_training_stops_early_and_a_restore_of_its_last_state_is_over(cache: Path) -> None:
    """The tokens are random, so each evaluation is worse than the first."""
    spec = spec_of({}, batches=1, stop=EarlyStopSpec(patience=1))
    recipe, hooks = PretrainRecipe(spec, cache), RecordingHooks()
    start_from_seed(recipe)
    assert train(recipe, ALONE, spec, hooks, 0) == 4
    assert [row.step for row in hooks.rows] == [1, 2, 3, 4]
    assert hooks.digests.keys() == {0, 1, 2, 3, 4}
    first, last = evaluated(hooks.rows).values()
    assert last > first
    state = bytearray(recipe.layout().payload_bytes)
    recipe.write_state(memoryview(state), 4)
    again = PretrainRecipe(spec, cache)
    start_from_seed(again)
    again.read_state(memoryview(state))
    steps = Steps(again, ALONE, spec, RecordingHooks(), 4)
    assert steps.over
    assert steps.early == EarlyStop("eval_loss", 1, first, 2)


def test_a_run_that_may_stop_early_continues_the_state_of_one_that_may_not(cache: Path) -> None:
    """As `init_from` with everything does."""
    before = PretrainRecipe(spec_of({}, every=0), cache)
    start_from_seed(before)
    train(before, ALONE, before.spec, RecordingHooks(), 0)
    state = bytearray(before.layout().payload_bytes)
    before.write_state(memoryview(state), 6)
    after = PretrainRecipe(spec_of({}, stop=EarlyStopSpec(patience=1)), cache)
    start_from_seed(after)
    assert [entry.name for entry in after.layout().tensors] == [
        entry.name for entry in before.layout().tensors
    ]
    assert after.read_state(memoryview(state)) == 6
    assert Steps(after, ALONE, after.spec, RecordingHooks(), 4).early is None


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("parallel", "model"),
    [
        ({"dp_shard": 2}, {}),
        slow({"dp_replicate": 3}, {}),
        ({"cp": 2, "tp": 2}, {}),
        ({"pp": 2, "dp_shard": 2}, {}),
        ({"pp": 2, "tp": 2, "schedule": "interleaved"}, {"layers": 4}),
        slow({"pp": 2, "schedule": "zero_bubble"}, {"layers": 4}),
    ],
    ids=str,
)
def test_a_mesh_has_the_results_of_one_process_and_the_bits_without_evaluation(
    worlds: Worlds, parallel: Mapping[str, Any], model: dict[str, Any]
) -> None:
    spec = spec_of(parallel, function="accuracy", **model)
    alone_rows = rows_of(worlds, spec_of({}, function="accuracy", **model))
    alone = evaluated(alone_rows)
    ranks = worlds.once(programs.undisturbed, spec)
    found = evaluated(ranks[0]["rows"])
    for row, other in zip(ranks[0]["rows"], alone_rows, strict=True):
        if row.own:
            accuracy = pytest.approx(other.own["eval_accuracy"], abs=0.01)
            assert (row.own["eval_targets"], row.own["eval_accuracy"]) == (1.0, accuracy)
    assert all(evaluated(rank["rows"]) == found for rank in ranks)
    assert found == pytest.approx(alone, abs=1e-5)
    assert found.keys() == {2, 4, 6}
    assert digests_of(worlds, spec) == digests_of(worlds, spec_of(parallel, every=0, **model))


@pytest.mark.seconds
@pytest.mark.parametrize(
    "parallel", [{"dp_shard": 2}, slow({"dp_replicate": 2}), slow({"pp": 2, "tp": 2})], ids=str
)
def test_the_average_is_evaluated_and_training_has_the_bits_without_evaluation(
    worlds: Worlds, parallel: Mapping[str, Any]
) -> None:
    spec = spec_of(parallel, average=True)
    found = evaluated(rows_of(worlds, spec))
    assert found == pytest.approx(evaluated(rows_of(worlds, spec_of({}, average=True))), abs=1e-5)
    assert found != pytest.approx(evaluated(rows_of(worlds, spec_of(parallel))), abs=1e-5)
    without = spec.model_copy(update={"evaluate": EvaluateSpec()})
    assert digests_of(worlds, spec) == digests_of(worlds, without)


def test_the_average_has_the_loss_of_a_model_with_its_weights(cache: Path) -> None:
    spec = spec_of({}, average=True)
    recipe, hooks = PretrainRecipe(spec, cache), RecordingHooks()
    start_from_seed(recipe)
    averages = {name: local.clone() for name, local in recipe.local_tensors("parameter").items()}

    def add(step: int, _: Recipe) -> None:
        for name, local in recipe.local_tensors("parameter").items():
            averages[name] = averages[name] * 0.5 + local * 0.5

    hooks.on_checkpoint = add
    train(recipe, ALONE, spec, hooks, 0)
    other = PretrainRecipe(spec_of({}), cache)
    start_from_seed(other)
    for name, local in other.local_tensors("parameter").items():
        local.copy_(averages[name])
    share = other.evaluate(spec.train.last_step, lambda name, step, micro_batch=0: None)
    expected = share.loss_sum / share.count
    assert evaluated(hooks.rows)[spec.train.last_step] == pytest.approx(expected, rel=1e-6)


@pytest.mark.seconds
@pytest.mark.parametrize("parallel", [{"dp_shard": 2}, slow({"pp": 2})], ids=str)
def test_a_rank_that_dies_in_an_evaluation_is_replaced_and_it_is_repeated(
    worlds: Worlds, tmp_path: Path, parallel: Mapping[str, Any]
) -> None:
    """With dropout, whose masks no evaluation changes. The survivors hold the average in the place
    of their weights at that moment."""
    spec, kill = spec_of(parallel, average=True, dropout=0.1), (EVALUATION_PHASE, STOP)
    without = spec.model_copy(update={"evaluate": EvaluateSpec()})
    expected = digests_of(worlds, without)
    assert_replaced(worlds, spec, tmp_path, expected, programs.survivor, kill)


@pytest.mark.seconds
def test_a_rank_that_dies_as_training_stops_early_changes_neither_bits_nor_the_last_step(
    worlds: Worlds, tmp_path: Path
) -> None:
    spec = spec_of({"dp_shard": 2}, stop=EarlyStopSpec(patience=1))
    expected = digests_of(worlds, spec)
    assert max(expected) == STOP
    kill = (EVALUATION_PHASE, STOP)
    assert_replaced(worlds, spec, tmp_path, expected, programs.survivor, kill)
