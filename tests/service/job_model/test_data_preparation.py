"""What is said of sources that are prepared."""

from __future__ import annotations

from holdfast_service.job_model.data_preparation import PreparePhase, SourceProgress, refusals


def test_a_reason_that_sources_share_is_said_once() -> None:
    def refused(path: str, error: str) -> SourceProgress:
        return SourceProgress(path, PreparePhase.REFUSED, error=error)

    ready = SourceProgress("/ready", PreparePhase.READY)
    gone = "the tokenizer does not exist"
    progress = [refused("/a", gone), ready, refused("/b", "no files"), refused("/c", gone)]
    assert refusals(progress) == f"/a and /c: {gone}; /b: no files"
    assert refusals([ready]) == ""
