"""What is said of sources and weights that are prepared."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast_service.job_model.preparation import (
    PreparePhase,
    SourceProgress,
    WeightsProgress,
    refusals,
)
from holdfast_workers.byte_sizes import size_of


def test_a_reason_that_sources_share_is_said_once() -> None:
    def refused(path: str, error: str) -> SourceProgress:
        return SourceProgress(path, PreparePhase.REFUSED, error=error)

    ready = SourceProgress("/ready", PreparePhase.READY)
    gone = "the tokenizer does not exist"
    progress = [refused("/a", gone), ready, refused("/b", "no files"), refused("/c", gone)]
    assert refusals(progress) == f"/a and /c: {gone}; /b: no files"
    assert refusals([ready]) == ""


def test_a_refusal_names_its_folder_once() -> None:
    found = WeightsProgress("/models/a", error="its index has no weight_map")
    assert found.refusal == "/models/a: its index has no weight_map"
    named = WeightsProgress("/models/a", error="/models/a has no config.json")
    assert named.refusal == "/models/a has no config.json"
    assert WeightsProgress("/models/a").refusal == ""


@given(
    total=st.integers(1, 10**13),
    share=st.floats(0, 1),
    speed=st.floats(0, 1e12),
    waits=st.sampled_from(["", "the disk is away"]),
)
def test_what_is_said_of_weights_that_are_read_is_true_of_them(
    total: int, share: float, speed: float, waits: str
) -> None:
    done = round(share * total)
    progress = WeightsProgress("/models/a", total, done, speed, waits)
    said = f"{size_of(done)} of {size_of(total)} of the weights of /models/a are read"
    assert progress.text.startswith(said)
    assert progress.text.endswith(f"; {waits}" if waits else ("read", " left"))
    is_estimated = speed > 0 and done >= total / 100 and (total - done) / speed >= 1
    assert (" left" in progress.text) == is_estimated
    assert not progress.is_over


def test_before_its_headers_are_read_no_size_of_a_folder_is_said() -> None:
    text = WeightsProgress("/models/a", waits="it waits for other preparations").text
    assert text == ("the configuration of /models/a is being read; it waits for other preparations")
