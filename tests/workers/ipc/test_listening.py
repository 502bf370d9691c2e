"""Listening sockets lie in the node's range of ports, and an exhausted range is an error."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.nodes.port_ranges import free_range

from holdfast_workers.ipc.listening import (
    HIGHEST_PORT,
    LOWEST_PORT,
    InvalidPortRange,
    PortRange,
    PortsExhausted,
    listen,
)

ALLOWED = st.integers(LOWEST_PORT, HIGHEST_PORT)


@st.composite
def ranges(draw: st.DrawFn) -> PortRange:
    first = draw(ALLOWED)
    return PortRange(first, draw(st.integers(first, min(first + 300, HIGHEST_PORT))))


@given(ranges(), st.integers(0, 10**6))
def test_every_port_of_the_range_is_tried_once_from_any_offset(
    ports: PortRange, offset: int
) -> None:
    tried = list(ports.from_offset(offset))
    assert sorted(tried) == list(range(ports.first, ports.last + 1))
    assert tried[0] == ports.first + offset % len(ports)


@given(ranges())
def test_a_range_is_read_as_it_is_written(ports: PortRange) -> None:
    assert PortRange.parse(str(ports)) == ports
    assert PortRange.parse(f" {ports.first} - {ports.last} ") == ports


@given(st.one_of(st.text(max_size=14), st.from_regex(r"\d{1,6}-\d{1,6}", fullmatch=True)))
def test_any_text_is_a_usable_range_none_or_refused(text: str) -> None:
    try:
        ports = PortRange.parse(text)
    except InvalidPortRange as error:
        assert "range of ports" in str(error)
        return
    if ports is None:
        assert not text.strip()
    else:
        assert LOWEST_PORT <= ports.first <= ports.last <= HIGHEST_PORT


@pytest.mark.parametrize("text", ["20000", "80-90", "3000-2000", "1024-65536", "a-b", "1-2-3"])
def test_an_unusable_range_is_refused(text: str) -> None:
    with pytest.raises(InvalidPortRange):
        PortRange.parse(text)


def test_sockets_share_a_range_until_it_is_exhausted() -> None:
    ports = free_range(4)
    with ExitStack() as stack:
        made = [stack.enter_context(listen("127.0.0.1", ports, 1)) for _ in range(4)]
        assert sorted(sock.getsockname()[1] for sock in made) == [*ports.from_offset(0)]
        with pytest.raises(PortsExhausted, match=f"all 4 ports of HOLDFAST_PORT_RANGE={ports}"):
            listen("127.0.0.1", ports, 1)
        made[2].close()
        stack.enter_context(listen("127.0.0.1", ports, 1))


def test_an_address_that_the_node_lacks_is_no_exhausted_range() -> None:
    with pytest.raises(OSError, match="assign requested address"):
        listen("192.0.2.77", PortRange(20000, 20009), 1)


def test_without_a_range_the_kernel_chooses() -> None:
    with listen("127.0.0.1", None, 1) as sock:
        assert sock.getsockname()[1] > 0
