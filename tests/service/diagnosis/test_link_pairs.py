"""Two rounds of pairs distinguish a bad node from a bad partner, for any number of nodes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast_service.diagnosis.link_pairs import Pair, culprits, first_round, second_round


def run_rounds(new: list[str], known: list[str], bad: set[str]) -> dict[Pair, bool]:
    """Both rounds; an exchange fails if either side is bad."""
    results = {pair: not bad & set(pair) for pair in first_round(new, known)}
    return results | {pair: not bad & set(pair) for pair in second_round(results, known)}


def names(count: int, letter: str) -> list[str]:
    return [f"{letter}{index}" for index in range(count)]


@given(st.integers(0, 9), st.integers(0, 4), st.data())
def test_no_good_node_is_ever_accused(new: int, known: int, data: st.DataObject) -> None:
    all_nodes = [*names(new, "n"), *names(known, "k")]
    bad = set(data.draw(st.lists(st.sampled_from(all_nodes)))) if all_nodes else set()
    results = run_rounds(names(new, "n"), names(known, "k"), bad)
    assert culprits(results) <= bad
    assert all(left != right for left, right in results)


@given(st.integers(3, 12), st.data())
def test_a_single_bad_node_is_found_among_three_and_more(count: int, data: st.DataObject) -> None:
    agents = names(count, "n")
    bad = data.draw(st.sampled_from(agents))
    assert culprits(run_rounds(agents, [], {bad})) == {bad}


@given(st.integers(4, 12), st.data())
def test_all_bad_nodes_are_found_if_one_pair_succeeds(count: int, data: st.DataObject) -> None:
    agents = names(count, "n")
    bad = set(data.draw(st.lists(st.sampled_from(agents))))
    results = run_rounds(agents, [], bad)
    if any(results[pair] for pair in first_round(agents, [])):
        assert culprits(results) == bad


def test_neither_of_only_two_nodes_is_accused() -> None:
    results = run_rounds(["n0", "n1"], [], {"n0"})
    assert results == {("n0", "n1"): False}
    assert culprits(results) == set()


def test_a_node_that_joins_alone_is_paired_with_a_known_node() -> None:
    assert first_round(["n2"], ["n0", "n1"]) == [("n2", "n0")]
    assert culprits(run_rounds(["n2"], ["n0", "n1"], {"n2"})) == {"n2"}
    assert culprits(run_rounds(["n2"], ["n0", "n1"], {"n0"})) == {"n0"}
    assert first_round(["n0"], []) == []
