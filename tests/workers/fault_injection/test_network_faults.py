"""Connections of one port are reset while both processes live; others are left alone."""

from __future__ import annotations

import socket

import pytest

from holdfast_workers.fault_injection.network_faults import reset_connections


def test_both_sides_of_a_ports_connections_see_the_reset_and_new_ones_are_accepted() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_server(("127.0.0.1", 0)) as other,
    ):
        port = listener.getsockname()[1]
        ends = [socket.create_connection(("127.0.0.1", port)) for _ in range(3)]
        accepted = [listener.accept()[0] for _ in ends]
        kept = socket.create_connection(other.getsockname())
        peer = other.accept()[0]
        assert reset_connections(port) == 3
        for end in ends:
            end.settimeout(60)
            with pytest.raises(ConnectionResetError):
                end.recv(1)
        for end in accepted:
            with pytest.raises(OSError):
                end.sendall(b"x" * (1 << 20))
        kept.sendall(b"!")
        assert peer.recv(1) == b"!"
        again = socket.create_connection(("127.0.0.1", port), timeout=60)
        listener.accept()[0].sendall(b"?")
        assert again.recv(1) == b"?"
        for end in (*ends, *accepted, kept, peer, again):
            end.close()


def test_a_port_without_connections_is_no_error() -> None:
    assert reset_connections(0) == 0
