"""The agreement is a pure function of the ranks' records, or it raises."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_workers.protocol.metrics import FOLDS
from holdfast_workers.state.digest import step_digest
from holdfast_workers.training.step_agreement import (
    Contribution,
    Disagreement,
    Record,
    Word,
    fold,
    gather,
)

FINITE = st.floats(allow_nan=False, allow_infinity=False)
INTEGERS = st.integers(-(2**63), 2**63 - 1)
OF_TYPE: dict[Any, st.SearchStrategy[Any]] = {
    bool: st.booleans(),
    int: INTEGERS,
    Word: st.integers(0, 2**64 - 1),
    float: FINITE,
    bytes: st.binary(min_size=16, max_size=16),
    tuple[int, int]: st.tuples(INTEGERS, INTEGERS),
}


def with_all_fields(kind: type[Any]) -> st.SearchStrategy[Any]:
    hints = get_type_hints(kind, include_extras=True)
    return st.builds(kind, **{name: OF_TYPE[hints[name]] for name in hints.keys() - NOT_PACKED})


NOT_PACKED = {"user_metrics"}
OF_TYPE[Contribution] = with_all_fields(Contribution)
RECORDS = with_all_fields(Record)


def share(data_index: int, **changes: Any) -> Contribution:
    base = Contribution(
        loss_sum=10.0,
        count=5,
        grad_sq=4.0,
        data_index=data_index,
        samples=100 + data_index,
        sample_count=4,
    )
    return replace(base, **changes)


def record(data_index: int, **changes: Any) -> Record:
    base = Record(
        attempt=3,
        step=7,
        contribution=share(data_index),
        state_step=6,
        state_digest=bytes([data_index] * 16),
        replicated_step=5,
    )
    return replace(base, **changes)


@given(RECORDS)
def test_a_record_survives_packing(record: Record) -> None:
    assert Record.unpack(record.pack()) == record


@given(RECORDS, RECORDS)
def test_all_records_have_the_same_size(first: Record, second: Record) -> None:
    assert len(first.pack()) == len(second.pack())


def test_shares_add_up_and_the_samples_of_peers_count_once() -> None:
    peer = record(1, contribution=share(1, loss_sum=0.0, count=0, loader_wait_s=0.25))
    agreed = fold([record(0), record(0), record(1), peer])
    assert agreed.loss == 30.0 / 15
    assert agreed.grad_norm == 4.0
    assert agreed.samples == f"{100 + 101:016x}"
    assert agreed.sample_count == 8
    assert agreed.loader_wait_s == 0.25
    assert not agreed.nonfinite


@pytest.mark.parametrize("name", FOLDS)
def test_a_metric_of_every_rank_is_folded_as_declared(name: str) -> None:
    of_ranks = (0.5, 0.25)
    agreed = fold([record(n, contribution=share(n, **{name: of_ranks[n]})) for n in range(2)])
    assert agreed.measured()[name] == FOLDS[name](of_ranks)


def test_the_state_digest_covers_the_ranks_in_order() -> None:
    agreed = fold([record(0), record(1)])
    assert agreed.state_step == 6
    assert agreed.state_digest == step_digest(("00" * 16, "01" * 16))
    assert fold([record(1), record(0)]).state_digest != agreed.state_digest


def test_the_digests_of_ranks_are_of_what_replicas_share() -> None:
    agreed = fold([record(0, shared_digest=b"a" * 16), record(1, shared_digest=b"b" * 16)])
    assert agreed.rank_digests == ("61" * 16, "62" * 16)


def test_without_rank_digests_there_is_no_state_digest() -> None:
    agreed = fold([record(0, state_step=-1), record(1, state_step=-1)])
    assert agreed.state_digest is None


def test_only_what_every_rank_has_replicated_counts() -> None:
    assert fold([record(0), record(1, replicated_step=2)]).replicated_step == 2


@pytest.mark.parametrize("change", [{"attempt": 2}, {"step": 8}, {"state_step": 5}])
def test_records_of_another_attempt_or_step_raise_a_disagreement(change: dict[str, int]) -> None:
    with pytest.raises(Disagreement, match="rank 1"):
        fold([record(0), record(1, **change)])


def test_peers_with_different_samples_raise_a_disagreement() -> None:
    stray = record(0, contribution=share(0, samples=999))
    with pytest.raises(Disagreement, match="rank 1 read other samples"):
        fold([record(0), stray])


def test_ranks_with_different_data_cannot_agree() -> None:
    fold([record(0, contribution=share(0, data=7)), record(1, contribution=share(1, data=7))])
    with pytest.raises(Disagreement, match="rank 1 has other data than rank 0"):
        fold([record(0, contribution=share(0, data=7)), record(1, contribution=share(1, data=8))])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_one_nonfinite_rank_makes_the_step_nonfinite(bad: float) -> None:
    assert fold([record(0), record(1, contribution=share(1, loss_sum=bad))]).nonfinite
    assert fold([record(0), record(1, contribution=share(1, grad_sq=bad))]).nonfinite
    assert fold([record(0, contribution=share(0, nonfinite=True)), record(1)]).nonfinite


def test_a_world_of_one_rank_needs_no_process_group() -> None:
    assert gather(record(0), 1) == [record(0)]


def test_a_stop_of_one_rank_stops_all_and_rank_zero_sets_the_save_intervals() -> None:
    records = [record(0, intervals=(2, 30)), record(1, stop=True, intervals=(1, 10))]
    agreed = fold(records)
    assert (agreed.stop, agreed.intervals) == (True, (2, 30))
    assert not fold([record(0), record(1)]).stop


def test_a_save_of_one_rank_is_under_way_for_all() -> None:
    saving = Record.unpack(record(1, saving=True).pack())
    assert fold([record(0), saving]).saving
    assert not fold([record(0), record(1)]).saving
