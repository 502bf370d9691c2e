"""`holdfast data prepare` and `show`: progress, result, refusal, samples."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.service.live_server import SPEC, LiveServer

from holdfast import Client
from holdfast.cli import data
from holdfast.cli.exit_codes import ExitCode
from holdfast.cli.main import run
from holdfast_service.job_model.preparation import PreparePhase, SourceProgress
from holdfast_service.job_model.supervisor_protocol import SamplesAnswer, SampleText
from holdfast_workers.spec import DataSpec, PreparedSpec, SourceSpec

PATH = "s3://lab/web/*.parquet"
DATA = DataSpec(sources=(SourceSpec(path=PATH, text="content"),))
PREPARED = PreparedSpec(
    uri=f"/tokens/{'1' * 32}",
    origin=DATA.origin_of(DATA.sources[0]),
    digest="0" * 32,
    vocabulary=256,
    tokens=7_000,
    sequence_length=256,
    samples=28,
)
READY = SourceProgress(
    PATH,
    PreparePhase.READY,
    files=3,
    total_bytes=9,
    done_bytes=9,
    tokens=7_000,
    documents=12,
    bad_count=7,
    bad=tuple(f"{PATH[:12]}-{n}.parquet, row {n}: it has no text" for n in range(1, 8)),
    prepared=PREPARED,
)


def at_home(server: LiveServer) -> SourceProgress:
    """Ready, with its token set where those of the server's jobs are."""
    uri = f"{server.settings.data_dir.absolute()}{PREPARED.uri}"
    return replace(READY, prepared=PREPARED.model_copy(update={"uri": uri}))


@pytest.fixture(autouse=True)
def at_server(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_ADDRESS", server.address)
    monkeypatch.setattr(data, "POLL_S", 0.02)


@pytest.fixture
def job_file(tmp_path: Path) -> str:
    file = tmp_path / "job.json"
    document = {**SPEC, "data": {"sources": [{"path": PATH, "text": "content"}]}}
    file.write_text(json.dumps(document))
    return str(file)


def test_it_prints_what_was_prepared_and_what_was_left_out(
    server: LiveServer, job_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    server.cluster.token_sets = (READY,)
    assert run(["data", "prepare", job_file]) == ExitCode.OK
    printed = capsys.readouterr()
    assert printed.out.splitlines()[1].split() == [PATH, "3", "12", "7,000", "0", "7"]
    assert printed.err.splitlines() == [
        *(f"left out: {bad}" for bad in READY.bad[:5]),
        f"left out: 2 more of {PATH}",
        "ready: 7,000 tokens",
    ]


@pytest.mark.parametrize(
    ("amount", "text"),
    [
        ("train.epochs=20", "epochs 20 comes to 35 steps"),
        ("train.tokens=1e6", "tokens 1,000,000 comes to 245 steps"),
    ],
)
def test_it_says_how_many_steps_tokens_or_epochs_come_to(
    server: LiveServer,
    job_file: str,
    amount: str,
    text: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    document = json.loads(Path(job_file).read_text())
    Path(job_file).write_text(json.dumps({**document, "train": {}}))
    server.cluster.token_sets = (at_home(server),)
    assert run(["data", "prepare", job_file, "--set", amount]) == ExitCode.OK
    assert capsys.readouterr().err.splitlines()[-1] == f"ready: 7,000 tokens; {text}"
    assert run(["data", "show", job_file, "--set", amount, "--json"]) == ExitCode.OK
    assert capsys.readouterr().err.splitlines()[-1] == f"ready: 7,000 tokens; {text}"


@pytest.mark.parametrize("command", ["prepare", "show"])
@pytest.mark.parametrize(
    ("changes", "prepared", "why"),
    [
        (
            {"train": {"epochs": 2, "schedule": {"warmup_steps": 20}}},
            {},
            "train.schedule.warmup_steps: warmup_steps 20 exceeds steps 4",
        ),
        (
            {"parallel": {"tp": 2, "vocabulary_parallel": True}},
            {"vocabulary": 257},
            "parallel.vocabulary_parallel: the vocabulary of 257 is not divisible by tp 2: use "
            "another tp, or remove vocabulary_parallel",
        ),
    ],
)
def test_a_job_that_would_not_fit_its_tokens_is_refused_with_the_reason_of_the_job(
    server: LiveServer,
    client: Client,
    job_file: str,
    command: str,
    changes: dict[str, Any],
    prepared: dict[str, Any],
    why: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = at_home(server)
    assert found.prepared is not None
    made = found.prepared.model_copy(update=prepared)
    server.cluster.token_sets = (replace(found, prepared=made),)
    document = {**json.loads(Path(job_file).read_text()), **changes}
    Path(job_file).write_text(json.dumps(document))
    assert run(["data", command, job_file]) == ExitCode.JOB_FAILED
    assert capsys.readouterr().err.splitlines()[-1] == f"refused: {why}"
    job = client.wait(client.submit(document).id)
    assert job.outcome is not None
    assert (job.outcome.code, job.outcome.message) == ("data_unfit", why)


def test_it_shows_how_far_it_is_and_ends_with_a_refusal(
    server: LiveServer,
    job_file: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    why = "part-7.parquet has no column 'content': set text to one of: body, title"
    half = replace(
        READY,
        phase=PreparePhase.TOKENIZING,
        done_bytes=4,
        bytes_per_s=1.0,
        waits="it waits for a free CPU of the cluster",
        prepared=None,
    )
    server.cluster.token_sets = (half,)

    def refuse(_: float) -> None:
        refused = replace(half, phase=PreparePhase.REFUSED, error=why)
        server.cluster.token_sets = (refused,)

    monkeypatch.setattr("time.sleep", refuse)
    assert run(["data", "prepare", job_file]) == ExitCode.JOB_FAILED
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith(
        "4 bytes of 9 bytes of its sources are tokens: 7,000 so far, about 15,800 in the end, "
        "about 5.0 s left; "
    )
    assert lines[0].endswith("it waits for a free CPU of the cluster")
    assert lines[-1] == f"refused: {PATH}: {why}"


def test_samples_are_shown_as_text(
    server: LiveServer, job_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    server.cluster.token_sets = (at_home(server),)
    texts = [f"To be, or not to be: {n}" for n in range(9)]
    samples = [SampleText(n, PATH, 9, text) for n, text in enumerate(texts)]
    server.cluster.samples = SamplesAnswer(tuple(samples))
    for asked, shown in ((["--samples", "1"], 1), (["--samples", "7"], 7), ([], 3)):
        assert run(["data", "show", job_file, *asked]) == ExitCode.OK
        lines = capsys.readouterr().out.splitlines()
        assert lines[::2] == [f"sample {n}, 9 tokens of {PATH}" for n in range(shown)]
        assert lines[1::2] == texts[:shown]


def test_the_job_s_record_names_the_tokenizer_and_what_was_read_of_each_source(
    server: LiveServer, client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    long = f"s3://lab/{'deep/' * 20}part-*.parquet"
    sources = [
        {"path": PATH, "text": "content", "weight": 0.75},
        {"path": long, "text": "text", "weight": 0.25},
    ]
    made = at_home(server).prepared
    assert made is not None
    section = DataSpec.model_validate({"sources": sources})
    sets = [
        made.model_copy(update={"tokenizer": "ab" * 16, "origin": section.origin_of(source)})
        for source in section.sources
    ]
    special = {"document_end": {"token": "<|end|>", "id": 7}, "pad": {"token": "<|pad|>", "id": 5}}
    data = {
        "sources": sources,
        "prepared": [each.model_dump(mode="json") for each in sets],
        "special_tokens": special,
    }
    job = client.submit({**SPEC, "data": data})
    assert run(["describe", job.id]) == ExitCode.OK
    printed = capsys.readouterr().out
    line = " ".join(printed.split())
    digest = f"digest {'ab' * 16}"
    assert f"Tokenizer bytes, 256 tokens, {digest}, document_end <|end|> 7, pad <|pad|> 5" in line
    after = printed.splitlines()
    rows = [row.split() for row in after[after.index("Sources") + 1 :][:3]]
    assert rows[0] == ["source", "weight", "tokens", "seen", "epoch"]
    assert rows[1] == [PATH, "0.75", "7,000", "0", "0.00"]
    assert rows[2][0] == "s3://lab/deep/d…ep/deep/deep/deep/part-*.parquet"


def test_a_spec_without_sources_or_with_damaged_data_is_refused_with_what_to_do(
    server: LiveServer, client: Client, job_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(job_file).write_text(json.dumps(SPEC))
    assert run(["data", "prepare", job_file]) == ExitCode.USAGE
    assert "the spec has no data.sources: there is nothing to prepare" in capsys.readouterr().err
    document = {**SPEC, "data": {"sources": [{"path": PATH, "text": "content"}]}}
    Path(job_file).write_text(json.dumps(document))
    server.cluster.token_sets = (at_home(server),)
    server.cluster.samples = SamplesAnswer(error="a shard is damaged: prepare the data again")
    assert run(["data", "show", job_file]) == ExitCode.CONFLICT
    assert "a shard is damaged: prepare the data again" in capsys.readouterr().err


def test_the_sizes_of_a_published_model_are_not_judged_before_its_folder_is_read(
    server: LiveServer, tmp_path: Path, job_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only the data is prepared; four heads, as the default, could not be divided by tp 3."""
    origin = DATA.model_copy(update={"tokenizer": str(tmp_path)}).origin_of(DATA.sources[0])
    ready = at_home(server)
    assert ready.prepared is not None
    made = ready.prepared.model_copy(update={"origin": origin})
    server.cluster.token_sets = (replace(ready, prepared=made),)
    sizes = ["--set", "parallel.tp=3", "--set", "parallel.dp_shard=2"]
    options = ["--set", f"model.from={tmp_path}", *sizes]
    assert run(["data", "prepare", job_file, *options]) == ExitCode.OK
    assert capsys.readouterr().err.splitlines()[-1] == "ready: 7,000 tokens"
    assert server.cluster.weights_asked == []
    assert run(["data", "prepare", job_file, *sizes]) == ExitCode.USAGE
    assert "heads 4 is not divisible by tp 3" in capsys.readouterr().err
