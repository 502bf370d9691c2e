"""The codec: every message survives it, within one version and between versions."""

from __future__ import annotations

import json
import math
import sys
import time
import warnings
from dataclasses import asdict, replace
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.protocol.messages import (
    example,
    expanded,
    name_of,
    values_of,
)

from holdfast_workers.protocol import codec
from holdfast_workers.protocol.answers import (
    AgentFailure,
    AgentReport,
    Answer,
    Done,
    PollAnswer,
    Refusal,
)
from holdfast_workers.protocol.commands import (
    Command,
    CommandKind,
    Fence,
    InjectFault,
    Query,
    Request,
)
from holdfast_workers.protocol.messages import (
    ErrorKind,
    ErrorReport,
    Held,
    LogLine,
    Place,
    StepRow,
)
from holdfast_workers.protocol.processes import (
    JOBS,
    WORKER_ORDERS,
    Forked,
    StorageZygoteConfig,
    ZygoteConfig,
)
from holdfast_workers.protocol.signals import (
    FirstStep,
    Signal,
    SignalDetail,
    SignalKind,
    WorkerFailed,
)

COMMANDS: tuple[type, ...] = get_args(Command | Query)
DETAILS: tuple[type, ...] = get_args(SignalDetail)
ANSWERS: tuple[type, ...] = get_args(Answer)
_OF_JOBS = [answer for kind in JOBS for answer in kind.answers if answer not in ANSWERS]  # type: ignore[attr-defined]
CONTROL = (
    *dict.fromkeys((*WORKER_ORDERS, *JOBS, *_OF_JOBS)),  # some kinds are of two directions
    ZygoteConfig,
    StorageZygoteConfig,
    Forked,
    AgentFailure,
    Refusal,
)
WHOLE = (Request, Signal, *ANSWERS, *CONTROL)
"""The kinds that are sent as documents of their own."""


@pytest.fixture(autouse=True)
def no_wrong_types() -> Any:
    """A field that holds another type than it declares is an error here."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # not of what an earlier test left open
        yield


@pytest.mark.seconds
@pytest.mark.parametrize("kind", WHOLE, ids=lambda kind: kind.__name__)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_every_message_survives_the_codec(kind: type, data: st.DataObject) -> None:
    value = data.draw(values_of(kind))
    document = codec.encode(value)
    assert isinstance(json.loads(document), dict)
    assert codec.decode(document, kind) == value


@pytest.mark.parametrize("kind", COMMANDS, ids=lambda kind: kind.__name__)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_every_command_survives_the_codec(kind: type, data: st.DataObject) -> None:
    request = Request(data.draw(values_of(kind)), 3)
    assert codec.decode(codec.encode(request), Request) == request


@pytest.mark.parametrize("kind", DETAILS, ids=lambda kind: kind.__name__)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_every_signal_survives_the_codec(kind: type, data: st.DataObject) -> None:
    signal = Signal(data.draw(values_of(kind)), "n0", "life", 1, 2.5)
    assert codec.decode(codec.encode(signal), Signal) == signal


def test_each_kind_of_command_and_signal_has_one_dataclass() -> None:
    assert [kind.kind for kind in COMMANDS] == list(CommandKind)  # type: ignore[attr-defined]
    assert [kind.kind for kind in DETAILS] == list(SignalKind)  # type: ignore[attr-defined]


# --- other versions -------------------------------------------------------------------------------


def examples() -> list[object]:
    """An example of every kind of message."""
    return [
        *(Request(example(kind), 3) for kind in COMMANDS),
        *(Signal(example(kind), "n0", "life", 7, 1.5, 2, 1, "n0.life.1", 42) for kind in DETAILS),
        *(example(kind) for kind in (*ANSWERS, *CONTROL)),
    ]


@pytest.mark.parametrize("value", examples(), ids=name_of)
def test_unknown_fields_at_any_level_are_ignored(value: object) -> None:
    document = expanded(value)
    read: object = codec.decode(document, *WHOLE)
    assert read == value and document.count(b"a_later") >= 2


def test_missing_optional_fields_take_their_defaults() -> None:
    command = b'{"kind":"fence","agent":"n0","attempt":2}'
    text = b'{"format":1,"kind":"Request","value":{"command":' + command + b"}}"
    assert codec.decode(text, Request) == Request(Fence("n0", 2))
    text = b'{"format":1,"kind":"Done","value":{}}'
    assert codec.decode(text, Done) == Done()


def test_a_missing_mandatory_field_and_a_damaged_document_are_refused() -> None:
    text = b'{"format":1,"kind":"Request","value":{"command":{"kind":"fence","agent":"n0"}}}'
    with pytest.raises(codec.UnreadableDocument, match=r"fence\.attempt"):
        codec.decode(text, Request)
    for damaged in (b"", b"{", b"[]", b'{"kind":"Done"}', codec.encode(Done())[:-3]):
        with pytest.raises(codec.UnreadableDocument):
            codec.decode(damaged, Done)


def test_a_newer_format_is_refused_with_both_versions() -> None:
    newer = json.dumps({"format": codec.FORMAT + 1, "kind": "Done", "value": {}}).encode()
    with pytest.raises(codec.UnreadableDocument, match=r"format 2, .* formats up to 1"):
        codec.decode(newer, Done)


def test_an_unknown_kind_is_refused_with_both_kinds() -> None:
    with pytest.raises(codec.UnreadableDocument, match=r"kind Done .*instead of AgentReport"):
        codec.decode(codec.encode(Done()), AgentReport)
    text = b'{"format":1,"kind":"Request","value":{"command":{"kind":"teleport","agent":"n0"}}}'
    with pytest.raises(codec.UnreadableDocument, match="teleport"):
        codec.decode(text, Request)


def test_an_error_shows_nothing_of_the_document() -> None:
    text = b'{"format":1,"kind":"ExchangeResult","value":{"problem":["password"]}}'
    with pytest.raises(codec.UnreadableDocument) as refused:
        codec.decode(text, *ANSWERS)
    assert "problem" in str(refused.value) and "password" not in str(refused.value)


# --- values ---------------------------------------------------------------------------------------


def test_numbers_keep_every_bit_and_may_be_infinite() -> None:
    for number in (0.1, 1 / 3, 5e-324, sys.float_info.max, math.inf, -math.inf, -0.0):
        read = codec.decode(codec.encode(first_step(number)), Signal)
        assert math.copysign(1, read.at) == math.copysign(1, number) and read.at == number
    assert math.isnan(codec.decode(codec.encode(first_step(math.nan)), Signal).at)


def first_step(at: float) -> Signal:
    return Signal(FirstStep(1, at), "n0", "life", 1, at)


def test_text_that_is_not_unicode_arrives_with_a_question_mark() -> None:
    """A user's exception may contain an unpaired surrogate; it must not block the report."""
    error = ErrorReport(ErrorKind.USER, "ValueError", "bad \udcff name", "", 3)
    read = codec.decode(codec.encode(Signal(WorkerFailed(error), "n0", "a", 1, 2.0)), Signal)
    assert isinstance(read.detail, WorkerFailed)
    assert read.detail.error == replace(error, message="bad ? name")
    assert codec.restore(ErrorReport, asdict(error)) == error


def test_a_fault_keeps_the_types_of_its_numbers() -> None:
    fault = InjectFault("n0", 1, {"kind": "slow", "rank": 1, "factor": 2.0, "target": "1"})
    read = codec.decode(codec.encode(Request(fault)), Request).command
    assert isinstance(read, InjectFault)
    assert [type(item) for item in read.fault.values()] == [str, int, float, str]


def test_values_of_one_version_are_restored_from_json() -> None:
    failure = WorkerFailed(ErrorReport(ErrorKind.USER, "E", "m", "t", 3))
    values = json.loads(json.dumps(asdict(failure)))
    assert codec.restore(WorkerFailed, values) == failure
    with pytest.raises(codec.UnreadableDocument, match="not the values of WorkerFailed: error"):
        codec.restore(WorkerFailed, {"error": None})


@pytest.mark.parametrize("kind", [PollAnswer, AgentReport])
def test_the_time_of_an_answer_grows_with_its_length_not_its_square(kind: type[Any]) -> None:
    """Of a poll with rows and lines, and of a report with checkpoints."""
    row = StepRow(1, 2, 1.7e9, 3.14159, 1.5, 1e-4, 4096, 0.0251, "a" * 32, compute_s=(0.1,) * 8)
    line = LogLine("n0", "life", 1, 1.7e9, "n0.life.1", 1, 0, "output", "x" * 80)

    def answer(length: int) -> PollAnswer | AgentReport:
        if kind is PollAnswer:
            digests = dict.fromkeys(range(length), "d" * 32)
            return PollAnswer((row,) * length, digests, (line,) * length, (), (), ())
        held = tuple(
            Held(rank, 5, 1, "dp=300", "d" * 32, 1 << 30, Place.OWN) for rank in range(length)
        )
        return AgentReport("n0", "life", "node", "h", 1, 2, 3, 300, 1, 1, True, held=held)

    def shortest_s(length: int) -> float:
        value, times = answer(length), []
        for _ in range(5):
            began = time.thread_time()
            codec.decode(codec.encode(value), type(value))
            times.append(time.thread_time() - began)
        return min(times)

    assert shortest_s(1600) < 64 * shortest_s(100)  # 16 times as long
