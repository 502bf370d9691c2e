"""What guards remember is a part of the state: the same after a restore as without one."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast_workers.spec import HISTORY_STEPS
from holdfast_workers.state.rank_state import RankState
from holdfast_workers.training.guard_memory import GuardMemory, OtherHistory
from holdfast_workers.training.skipped_windows import Ledger

SKIPPED = st.lists(
    st.tuples(st.integers(0, 400), st.integers(1, 3)).map(lambda one: (one[0], one[0] + one[1])),
    max_size=5,
).map(Ledger.of)


def _ran(memory: GuardMemory, first: int, last: int) -> None:
    for step in range(first, last + 1):
        draw = random.Random(step)
        memory.applied(step, draw.random(), draw.random())


def _payload(memory: GuardMemory) -> bytearray:
    state = RankState(memory.pieces(primary=True), [])
    payload = bytearray(state.layout.payload_bytes)
    state.freeze({}).write(memoryview(payload))
    return payload


def _restored(payload: bytearray, step: int, known: Ledger | None = None) -> GuardMemory:
    memory = GuardMemory()
    memory.know(known or Ledger())
    RankState(memory.pieces(primary=True), []).read(memoryview(payload))
    memory.was_read(step)
    return memory


@settings(max_examples=40)
@given(
    ledger=SKIPPED,
    saved=st.integers(1, HISTORY_STEPS + 40),
    more=st.integers(0, 40),
    told=st.booleans(),
)
def test_a_restore_changes_nothing_that_comes_after(
    ledger: Ledger, saved: int, more: int, told: bool
) -> None:
    straight = GuardMemory()
    straight.know(ledger)
    straight.reset()
    _ran(straight, 1, saved)
    payload = _payload(straight)
    restored = _restored(payload, saved, ledger if told else None)
    assert restored.ledger == (ledger if told else ledger.passed(saved))
    restored.ledger |= ledger  # what the other one knows of the future
    _ran(straight, saved + 1, saved + more)
    _ran(restored, saved + 1, saved + more)
    assert _payload(restored) == _payload(straight)
    step = saved + more + 1
    assert restored.before(step, 65) == straight.before(step, 65)


def test_it_remembers_the_last_steps_oldest_first() -> None:
    memory = GuardMemory()
    for step in range(1, HISTORY_STEPS + 11):
        memory.applied(step, float(step), -float(step))
    losses, norms = memory.before(HISTORY_STEPS + 11, 3)
    assert losses == [HISTORY_STEPS + 8.0, HISTORY_STEPS + 9.0, HISTORY_STEPS + 10.0]
    assert norms == [-one for one in losses]
    assert memory.before(HISTORY_STEPS + 11, HISTORY_STEPS)[0][0] == 11.0


def test_a_skip_is_part_of_the_state_once_the_step_after_it_is_applied() -> None:
    found_out, knew = GuardMemory(), GuardMemory()
    knew.know(Ledger(((4, 5),)))
    knew.reset()
    _ran(knew, 1, 4)
    _ran(found_out, 1, 4)
    assert _payload(found_out) == _payload(knew)
    found_out.skip(4, 5)
    assert _payload(found_out) == _payload(knew)
    _ran(knew, 5, 5)
    _ran(found_out, 5, 5)
    assert _payload(found_out) == _payload(knew)
    assert _restored(_payload(knew), 5).ledger == Ledger(((4, 5),))


def test_a_state_that_has_read_what_is_in_the_ledger_is_refused() -> None:
    memory = GuardMemory()
    _ran(memory, 1, 9)
    payload = _payload(memory)
    assert _restored(payload, 9, Ledger(((9, 10),))).ledger == Ledger(((9, 10),))
    with pytest.raises(OtherHistory, match=r"should be \[\(7, 10\)\]"):
        _restored(payload, 9, Ledger(((7, 10),)))
