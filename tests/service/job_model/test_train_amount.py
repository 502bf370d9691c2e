"""`train.steps`, `tokens` and `epochs`: what they come to, and each fault with its sentence."""

from __future__ import annotations

from bisect import bisect_left
from fractions import Fraction
from math import ceil
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_service.errors import InvalidSpec
from holdfast_service.job_model.job_spec import JobSpec, parse, prepared_faults, with_data
from holdfast_service.job_model.preparation import (
    PreparePhase,
    SourceProgress,
    with_token_sets,
)
from holdfast_workers.spec import (
    DataSpec,
    PreparedSpec,
    SourceSpec,
    SpecialTokenSpec,
    TrainingSpec,
    TrainSpec,
)
from holdfast_workers.spec.train import MOST_SOURCES

WEB = SourceSpec(path="s3://lab/web/*.parquet")
DATA = DataSpec(sources=(WEB,))
SOURCES = {"sources": [{"path": WEB.path}]}
VIT = {"family": "vit", "image_size": 32, "patch_size": 8, "classes": 10}
MOST = 2**53 - 1


def job(train: dict[str, Any], **sections: Any) -> dict[str, Any]:
    return {"name": "x", "train": train, **sections}


def faults(document: dict[str, Any]) -> list[tuple[str, str]]:
    with pytest.raises(InvalidSpec) as refused:
        parse(document, None)
    return [(fault["path"], fault["message"]) for fault in refused.value.faults]


def prepared(samples: int, sequence_length: int = 256) -> PreparedSpec:
    return PreparedSpec(
        uri="s3://lab/sets/a",
        origin=DATA.origin_of(WEB),
        digest="0" * 32,
        vocabulary=256,
        tokens=10**9,
        sequence_length=sequence_length,
        samples=samples,
    )


def with_samples(spec: JobSpec, samples: int) -> JobSpec:
    sets = (prepared(samples, spec.model.sequence_length),)
    return with_data(spec, spec.data.model_copy(update={"prepared": sets}))


@given(
    tokens=st.integers(1, MOST),
    micro=st.integers(1, 4),
    passes=st.integers(1, 64),
    length=st.integers(1, 512).map(lambda half: 2 * half),
)
def test_tokens_come_to_the_fewest_steps_that_have_them(
    tokens: int, micro: int, passes: int, length: int
) -> None:
    batch = micro * passes
    train: dict[str, Any] = {
        "tokens": tokens,
        "global_batch": batch,
        "micro_batch": micro,
    }
    train["schedule"] = {"warmup_steps": 0}
    spec = parse(job(train, model={"sequence_length": length}), None)
    steps, of_step = spec.train.last_step, batch * length
    assert (steps - 1) * of_step < train["tokens"] <= steps * of_step
    assert parse(spec.model_dump(mode="json"), None) == spec


@given(
    epochs=st.one_of(st.integers(1, 1000), st.floats(1e-3, 1e3)),
    samples=st.integers(1, 10**9),
    batch=st.integers(1, 4096),
)
def test_epochs_come_to_the_fewest_steps_that_have_their_samples(
    epochs: float, samples: int, batch: int
) -> None:
    train: dict[str, Any] = {"epochs": epochs, "global_batch": batch, "micro_batch": 1}
    train["schedule"] = {"warmup_steps": 0}
    waiting = parse(job(train, data=SOURCES), None)
    assert waiting.train.steps is None
    assert parse(waiting.model_dump(mode="json"), None) == waiting
    known = with_samples(waiting, samples)
    steps, wanted = known.train.last_step, Fraction(repr(epochs)) * samples
    assert (steps - 1) * batch < wanted <= steps * batch
    assert prepared_faults(known) == []
    assert parse(known.model_dump(mode="json"), None) == known
    other = with_data(known, known.data.model_copy(update={"prepared": (prepared(samples + 7),)}))
    assert other.train.steps == ceil(Fraction(repr(epochs)) * (samples + 7) / batch)


@pytest.mark.parametrize("tokens", [20e9, 20_000_000_000, "20e9", "2e+10", "20.0e9", 20.0e9])
def test_tokens_are_written_as_a_number_also_as_yaml_reads_20e9(tokens: Any) -> None:
    spec = parse(job({"tokens": tokens}), None)
    assert (spec.train.tokens, spec.train.steps) == (20_000_000_000, 4_882_813)


@pytest.mark.parametrize("tokens", ["9" * 5000, "1." + "0" * 5000], ids=len)
def test_a_number_of_thousands_of_digits_is_refused_in_a_sentence_of_ours(tokens: str) -> None:
    (fault,) = faults(job({"tokens": tokens}))
    assert fault[0] == "train.tokens"
    assert fault[1].startswith(f"input should be a whole number of tokens from 1 to {MOST}, such")


def test_without_an_amount_a_job_has_300_steps() -> None:
    assert parse({"name": "x"}, None).train.steps == TrainSpec().last_step == 300
    with pytest.raises(ValueError, match="not known before the sources are prepared"):
        _ = TrainSpec(epochs=1).last_step


@pytest.mark.parametrize(
    "tokens", [0, -1, 0.5, 1e300, MOST + 1.0, "1e-3", "many", True, "0x10", []]
)
def test_what_is_no_number_of_tokens_is_refused(tokens: Any) -> None:
    (fault,) = faults(job({"tokens": tokens}))
    assert fault == (
        "train.tokens",
        f"input should be a whole number of tokens from 1 to {MOST}, such as 20e9, not {tokens!r}",
    )


NO_SOURCES = (
    "epochs are counted in the prepared tokens of `data.sources`, and there are none: name the "
    "files there, or set train.tokens or train.steps"
)
OF_IMAGES = "a model of the family vit reads images, not tokens: set train.steps"


@pytest.mark.parametrize(
    ("document", "path", "message"),
    [
        (
            job({"tokens": 1e6, "epochs": 2}, data=SOURCES),
            "train.epochs",
            "a job has either tokens or epochs: remove one of them",
        ),
        (
            job({"tokens": 1e6, "steps": 100}),
            "train.steps",
            "steps 100 is beside tokens 1,000,000, which comes to 245 steps: remove one of them",
        ),
        (
            job({"epochs": 2, "steps": 100}, data=SOURCES),
            "train.steps",
            "steps 100 is beside epochs 2: remove one of them",
        ),
        (job({"steps": None}), "train.steps", "it is null: write steps, tokens or epochs"),
        (job({"epochs": 0.5}), "train.epochs", NO_SOURCES),
        (
            job({"epochs": 2}, data={"sources": [{"path": WEB.path, "weight": 1}]}),
            "train.epochs",
            "with weights, each source has epochs of its own: set train.tokens or train.steps, or "
            "remove the weights",
        ),
        (job({"tokens": 1e6}, model=VIT, data={"source": "/i"}), "train.tokens", OF_IMAGES),
        (job({"epochs": 2}, model=VIT, data={"source": "/i"}), "train.epochs", OF_IMAGES),
        (
            job({"tokens": 1e6}, function="a:b"),
            "train.tokens",
            "a function reads its own data, whose tokens are not known: set train.steps",
        ),
        (
            job({"tokens": 1e6}, recipe="a:b"),
            "train.tokens",
            "a recipe of your own makes its own samples, of unknown size: set train.steps",
        ),
        (
            job({"tokens": 5000}),
            "train.schedule.warmup_steps",
            "warmup_steps 20 exceeds steps 2",
        ),
    ],
)
def test_each_fault_says_where_it_is_and_what_to_do(
    document: dict[str, Any], path: str, message: str
) -> None:
    assert faults(document) == [(path, message)]


def test_epochs_need_the_samples_of_their_own_sequences() -> None:
    spec = with_samples(parse(job({"epochs": 2}, data=SOURCES), None), 1000)
    longer = {**spec.model_dump(mode="json"), "model": {"sequence_length": 512}}
    assert faults(longer) == [
        (
            "data.prepared",
            "its samples were not counted for model.sequence_length 512: remove `prepared`, and "
            "the server prepares the sources",
        )
    ]
    other_epochs = {**spec.model_dump(mode="json"), "train": {"epochs": 3, "steps": 125}}
    assert faults(other_epochs) == [
        (
            "train.steps",
            "steps 125 is beside epochs 3, which comes to 188 steps: remove one of them",
        )
    ]


def test_a_schedule_of_meshes_is_compared_with_epochs_once_they_are_known() -> None:
    meshes = [(0, 2), (200, 1)]
    schedule = [{"after_step": step, "mesh": {"dp_shard": size}} for step, size in meshes]
    nodes = {"min": 1, "max": 2, "schedule": schedule}
    document = job(
        {"epochs": 2},
        data=SOURCES,
        parallel={"dp_shard": "auto"},
        resources={"nodes": nodes},
        checkpoint={"memory": {"every_steps": 1}},
    )
    spec = parse(document, None)
    assert prepared_faults(with_samples(spec, 1609)) == []
    (fault,) = prepared_faults(with_samples(spec, 1600))
    assert (fault.path, fault.message) == (
        "resources.nodes.schedule.1.after_step",
        "200 must be more than 0 and less than 200 steps",
    )


def test_the_training_part_keeps_amount_and_steps() -> None:
    spec = parse(job({"tokens": 1e6}), None)
    assert TrainingSpec.model_validate_json(spec.training().model_dump_json()) == spec.training()


def test_what_the_server_adds_does_not_count_for_the_limit_of_a_specs_size() -> None:
    """The largest spec that is accepted is accepted again once its sources are prepared."""

    def document(length: int) -> dict[str, Any]:
        env = {f"V{at}": "x" * 4000 for at in range(7)}
        paths = [f"/{'p' * (length // MOST_SOURCES)}{at:03d}" for at in range(MOST_SOURCES)]
        data = {"sources": [{"path": path} for path in paths], "validation": {"path": "/b"}}
        return job({"epochs": 2}, data=data, env=env)

    def is_accepted(length: int) -> bool:
        try:
            return parse(document(length), None) is not None
        except InvalidSpec as refused:
            assert "keep large settings in a file" in str(refused.faults)
            return False

    steps = range(0, 60_000, MOST_SOURCES)
    largest = steps[bisect_left(steps, True, key=lambda length: not is_accepted(length)) - 1]
    assert is_accepted(largest) and not is_accepted(largest + MOST_SOURCES)
    spec = parse(document(largest), None)
    assert spec.data.validation is not None and spec.data.validation.source is not None
    sources = (*spec.data.sources, spec.data.validation.source)
    made = [
        prepared(10**9).model_copy(update={"digest": f"{at:032x}", "origin": origin})
        for at, origin in enumerate(map(spec.data.origin_of, sources))
    ]
    special = {"eos": SpecialTokenSpec(id=5, token="<" + "e" * 200 + ">")}
    progress = [
        SourceProgress("", PreparePhase.READY, prepared=each, special_tokens=special)
        for each in made
    ]
    data = with_token_sets(spec.data, progress)
    assert data is not None
    known = with_data(spec, data)
    assert known.train.steps is not None and known.data.validation != spec.data.validation
    assert parse(known.model_dump(mode="json"), None) == known
