"""The division of a machine among the nodes of its embedded cluster."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_service.embedded_cluster.node_shares import (
    LEAST_CPUS,
    NodeShare,
    default_nodes,
    divide,
    share_of,
    visible_gpus,
)

UUIDS = ("GPU-aa01", "GPU-ab02", "GPU-b003")
gpu_lists = st.lists(st.text("abc-01", min_size=1), unique=True, max_size=12)


@given(cpus=st.integers(1, 256), gpus=gpu_lists, nodes=st.integers(1, 16))
def test_each_gpu_belongs_to_exactly_one_node_and_the_shares_are_nearly_equal(
    cpus: int, gpus: list[str], nodes: int
) -> None:
    shares = divide(cpus, gpus, nodes)
    assert len(shares) == nodes
    assert [gpu for share in shares for gpu in share.gpus] == gpus
    for sizes in ([len(share.gpus) for share in shares], [share.cpus for share in shares]):
        assert sizes == sorted(sizes, reverse=True), "the remainder goes to the first nodes"
        assert sizes[0] - sizes[-1] <= 1
    assert all(share.cpus >= LEAST_CPUS for share in shares)
    if cpus >= LEAST_CPUS * nodes:
        assert sum(share.cpus for share in shares) == cpus
    assert share_of(shares, nodes + 2) == NodeShare(shares[-1].cpus), "a later node has no GPU"


def test_a_machine_with_gpus_is_one_node_and_one_without_is_three() -> None:
    assert [default_nodes(gpus) for gpus in (0, 1, 8)] == [3, 1, 1]
    (whole,) = divide(96, UUIDS, default_nodes(len(UUIDS)))
    assert whole == NodeShare(96, UUIDS)


def test_nodes_beyond_the_number_of_gpus_have_none() -> None:
    assert [share.gpus for share in divide(8, UUIDS[:1], 3)] == [UUIDS[:1], (), ()]


@pytest.mark.parametrize(("nodes", "gpus"), [(0, UUIDS), (2, ("0", "0"))])
def test_an_impossible_division_is_refused(nodes: int, gpus: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=r"at least one|named twice"):
        divide(4, gpus, nodes)


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        (None, UUIDS),
        ("", ()),
        ("2,0", ("2", "0")),
        (" 1 , GPU-b ", ("1", "GPU-b")),
        ("0,7,1", ("0",)),  # the list ends before a name of no device
        ("-1,0", ()),
        ("0,GPU-aa01", ("0",)),  # the same device again
        ("GPU-a", ()),  # two devices begin so
        ("NoDevFiles", ()),
        ("MIG-1c2d", ("MIG-1c2d",)),
    ],
)
def test_the_device_variable_selects_gpus(wanted: str | None, found: tuple[str, ...]) -> None:
    assert visible_gpus(UUIDS, wanted) == found
