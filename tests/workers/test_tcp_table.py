"""Whose the other end of a connection is, from the kernel's tables."""

from __future__ import annotations

import os
import socket

import pytest
from tests.support.other_users.stranger import stranger
from tests.support.waiting import eventually

from holdfast_workers.tcp_table import (
    Owner,
    TcpEnd,
    owner_of_other,
    owners_of_others,
    parse_table,
)

TABLE = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 11 1 0
   1: 0100007F:1F90 0100007F:C001 01 00000000:00000000 00:00000000 00000000  1000        0 12 1 0
"""
TABLE_OF_IPV6 = """\
  sl  local_address                         remote_address                        st ...
   0: 0000000000000000FFFF00000100007F:C001 0000000000000000FFFF00000100007F:1F90 01 \
00000000:00000000 00:00000000 00000000 65534        0 13 1 0
"""
HERE, THERE = "0100007F:1F90", "0100007F:C001"
OWN = TcpEnd(HERE, THERE, "01", 1000, "12")


def test_tables_of_both_families_have_the_same_addresses() -> None:
    assert list(parse_table(TABLE))[1] == OWN
    assert list(parse_table(TABLE_OF_IPV6)) == [TcpEnd(THERE, HERE, "01", 65534, "13")]


@pytest.mark.parametrize(
    ("other", "owner"),
    [
        (TcpEnd(THERE, HERE, "01", 1000, "13"), Owner.SAME_USER),
        (TcpEnd(THERE, HERE, "01", 65534, "13"), Owner.OTHER_USER),
        (TcpEnd(THERE, HERE, "08", 65534, "13"), Owner.OTHER_USER),
        (TcpEnd(THERE, HERE, "01", 0, "0"), Owner.NOT_YET),
        (TcpEnd(THERE, HERE, "06", 0, "0"), Owner.UNKNOWN),  # closed
        (TcpEnd(THERE, "0200007F:1F90", "01", 65534, "13"), Owner.UNKNOWN),  # of another one
    ],
)
def test_the_other_end_of_a_connection_has_an_owner(other: TcpEnd, owner: Owner) -> None:
    ends = {(end.local, end.remote): end for end in (OWN, other)}
    assert owner_of_other(OWN, ends, 1000) is owner


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_the_kernel_shows_own_and_waiting_ends(family: socket.AddressFamily) -> None:
    with (
        socket.create_server(("", 0), family=family) as listener,
        socket.create_connection(listener.getsockname()[:2]) as made,
    ):
        assert owners_of_others([_inode(made)]) == {Owner.NOT_YET}
        with listener.accept()[0] as accepted:
            assert owners_of_others([_inode(made), _inode(accepted)]) == {Owner.SAME_USER}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may start a program of another user")
def test_the_kernel_shows_another_user() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, stranger() as other:
        other.send(listener.getsockname()[1])
        with listener.accept()[0] as accepted:
            eventually(lambda: owners_of_others([_inode(accepted)]) == {Owner.OTHER_USER})


def _inode(end: socket.socket) -> str:
    return str(os.fstat(end.fileno()).st_ino)
