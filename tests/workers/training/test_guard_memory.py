"""The history of the guards is part of the state: the same after a restore as without one."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast_workers.spec import HISTORY_STEPS
from holdfast_workers.state.rank_state import RankState
from holdfast_workers.training.guard_memory import GuardMemory, LedgerMismatch
from holdfast_workers.training.skipped_windows import Ledger

SKIPPED = st.lists(
    st.tuples(st.integers(0, 400), st.integers(1, 3)).map(
        lambda pair: (pair[0], pair[0] + pair[1])
    ),
    max_size=5,
).map(Ledger.of)


def _ran(memory: GuardMemory, first: int, last: int) -> None:
    for step in range(first, last + 1):
        draw = random.Random(step)
        memory.record_step(step, draw.random(), draw.random())


def _payload(memory: GuardMemory) -> bytearray:
    state = RankState(memory.pieces(primary=True), [])
    payload = bytearray(state.layout.payload_bytes)
    state.freeze({}).write(memoryview(payload))
    return payload


def _restored(payload: bytearray, step: int, known: Ledger | None = None) -> GuardMemory:
    memory = GuardMemory()
    memory.set_ledger(known or Ledger())
    RankState(memory.pieces(primary=True), []).read(memoryview(payload))
    memory.adopt_loaded_state(step)
    return memory


@settings(max_examples=40)
@given(
    ledger=SKIPPED,
    saved=st.integers(1, HISTORY_STEPS + 40),
    more=st.integers(0, 40),
    ledger_known=st.booleans(),
)
def test_a_restore_changes_nothing_that_comes_after(
    ledger: Ledger, saved: int, more: int, ledger_known: bool
) -> None:
    straight = GuardMemory()
    straight.set_ledger(ledger)
    straight.reset()
    _ran(straight, 1, saved)
    payload = _payload(straight)
    restored = _restored(payload, saved, ledger if ledger_known else None)
    assert restored.ledger == (ledger if ledger_known else ledger.passed(saved))
    restored.ledger |= ledger  # the windows ahead that `straight` knows
    _ran(straight, saved + 1, saved + more)
    _ran(restored, saved + 1, saved + more)
    assert _payload(restored) == _payload(straight)
    step = saved + more + 1
    assert restored.history_before(step, 65) == straight.history_before(step, 65)


def test_the_history_returns_the_last_steps_oldest_first() -> None:
    memory = GuardMemory()
    for step in range(1, HISTORY_STEPS + 11):
        memory.record_step(step, float(step), -float(step))
    losses, norms = memory.history_before(HISTORY_STEPS + 11, 3)
    assert losses == [HISTORY_STEPS + 8.0, HISTORY_STEPS + 9.0, HISTORY_STEPS + 10.0]
    assert norms == [-loss for loss in losses]
    assert memory.history_before(HISTORY_STEPS + 11, HISTORY_STEPS)[0][0] == 11.0


def test_a_skip_is_part_of_the_state_once_the_step_after_it_is_applied() -> None:
    found_out, knew = GuardMemory(), GuardMemory()
    knew.set_ledger(Ledger(((4, 5),)))
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


def test_a_state_that_read_a_skipped_window_is_refused() -> None:
    memory = GuardMemory()
    _ran(memory, 1, 9)
    payload = _payload(memory)
    assert _restored(payload, 9, Ledger(((9, 10),))).ledger == Ledger(((9, 10),))
    with pytest.raises(LedgerMismatch, match=r"should be \[\(7, 10\)\]"):
        _restored(payload, 9, Ledger(((7, 10),)))
