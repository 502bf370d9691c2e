"""TLS between nodes: what it protects, whom it refuses and with which words, and files that
change."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
import structlog
from cryptography.hazmat.primitives import serialization
from tests.support.faults.faulty_link import FaultyLink
from tests.support.memory.certificates import LONG_AGO, certified, new_authority, put
from tests.support.memory.data_nodes import PATIENT, QUICK, Node, source_at
from tests.support.memory.shm import MESH, SECRET, content, write
from tests.support.waiting import DEADLINE_S, eventually

from holdfast_service.host_cluster.certificates import CertificateAuthority, issue
from holdfast_workers.memory import peer_tls, wire
from holdfast_workers.memory.box_transfer import BoxChannel
from holdfast_workers.memory.fetch import SourceLost, fetch
from holdfast_workers.memory.lifeline import Lifelines
from holdfast_workers.memory.link_probe import exchange
from holdfast_workers.memory.peer_tls import (
    AUTHORITY_FILE,
    CERTIFICATE_FILE,
    KEY_FILE,
    PeerTls,
    TlsUnusable,
)
from holdfast_workers.memory.wire import Role, Timeouts, WireError
from holdfast_workers.protocol.lease import Grant
from holdfast_workers.protocol.messages import Origin, Partner, Place

TIMEOUT_S = 1.0
Nodes = Callable[..., Node]


@pytest.fixture(scope="module")
def ours() -> CertificateAuthority:
    return new_authority()


@pytest.fixture(scope="module")
def theirs() -> CertificateAuthority:
    return new_authority()


@pytest.fixture
def tls(tmp_path: Path, ours: CertificateAuthority) -> PeerTls:
    return PeerTls(certified(tmp_path / "ours", ours))


@pytest.fixture
def unrehearsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node uses its files unseen, as if its certificate had expired since it read them."""
    monkeypatch.setattr(peer_tls, "_rehearse", lambda client, server: 0.0)


@contextlib.contextmanager
def watching(node: Node, tls: PeerTls | None) -> Iterator[tuple[Lifelines, list[str]]]:
    """A lifeline to the node, and why it was lost."""
    lost: list[str] = []
    lifelines = Lifelines(SECRET, lambda _, reason: lost.append(reason), TIMEOUT_S, tls=tls)
    lifelines.watch("there", "127.0.0.1", node.server.port)
    try:
        yield lifelines, lost
    finally:
        lifelines.close()


@contextlib.contextmanager
def relay(port: int, tls: PeerTls) -> Iterator[int]:
    """A port of a third party that ends TLS on both sides with certificates of its own, forwards
    one connection, and writes 999 over the step of every state that is pushed."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def run() -> None:
            near, _ = listener.accept()
            far = socket.create_connection(("127.0.0.1", port), DEADLINE_S)
            near.sendall(far.recv(wire.OPENING_BYTES))
            with tls.server(near) as to_client, tls.client(far) as to_server:
                for side in (to_server, to_client):
                    side.do_handshake()
                back = threading.Thread(target=forward, args=(to_server, to_client))
                back.start()
                with contextlib.suppress(OSError, WireError):
                    claim = wire.receive_header(to_client)
                    wire.send_header(to_server, claim)
                    while claim["role"] == Role.PUSH:
                        change(to_client, to_server)
                    forward(to_client, to_server)
                for side in (to_server, to_client):
                    wire.shut(side)
                back.join()

        def forward(source: socket.socket, sink: socket.socket) -> None:
            with contextlib.suppress(OSError):
                while piece := source.recv(wire.RECORD_BYTES):
                    sink.sendall(piece)
            for side in (source, sink):
                wire.shut(side)

        def change(source: socket.socket, sink: socket.socket) -> None:
            header = wire.receive_header(source)
            if "step" in header:
                header["step"] = 999
            wire.send_header(sink, header)
            payload = bytearray(int(header.get("nbytes", 0)))
            wire.receive_into(source, memoryview(payload))
            sink.sendall(payload)

        thread = threading.Thread(target=run)
        thread.start()
        yield listener.getsockname()[1]
        thread.join(60)
        assert not thread.is_alive()


def connected(node: Node, tls: PeerTls | None) -> socket.socket:
    return wire.connect(SECRET, "127.0.0.1", node.server.port, Role.FETCH, PATIENT, tls=tls)


def refusal(node: Node, tls: PeerTls | None) -> str:
    """Why no connection is made, which is known long before the deadline of a handshake."""
    hour = Timeouts(3600.0, 3600.0, 3600.0)
    with pytest.raises(WireError) as refused:
        wire.connect(SECRET, "127.0.0.1", node.server.port, Role.FETCH, hour, tls=tls)
    return str(refused.value)


def test_states_travel_encrypted_in_every_way(node: Nodes, tls: PeerTls) -> None:
    here, there, third = (node(name, tls=tls) for name in "abc")
    commit = write(here.worker(0), attempt=1, step=7)
    here.replicator.set_partners(0, (there.partner,))
    here.replicator.offer(0, 1, 7)
    eventually(lambda: here.replicated == [(0, 1, 7)])
    source = source_at(there.server.port, 7, Place.REPLICA, commit.digest)
    held = fetch(SECRET, source, 0, third.store, DEADLINE_S, timeouts=PATIENT, tls=tls)
    assert held.digest == commit.digest
    segment = third.store.find(0, Place.OWN)
    assert segment is not None
    with segment.payload(segment.commits()[0]) as payload:
        assert bytes(payload) == content(len(payload), 1, 7)
    of_mesh = replace(source, mesh=MESH)
    channel = BoxChannel.connect(SECRET, "127.0.0.1", there.server.port, of_mesh, PATIENT, tls)
    with channel.sock:
        origin = Origin(0, "source", Place.REPLICA, "", 0, commit.digest)
        assert channel.layout(origin, time.monotonic() + DEADLINE_S) == segment.layout
    assert exchange(SECRET, "127.0.0.1", there.server.port, DEADLINE_S, tls) == ""
    with connected(there, tls) as sock:
        assert isinstance(sock, ssl.SSLSocket)
        assert sock.version() == "TLSv1.3"


@pytest.mark.seconds
def test_a_lifeline_carries_beats_and_grants(shm: Path, tls: PeerTls) -> None:
    granted: list[Grant] = []
    node = Node.start(shm, "a", MESH, tls)
    node.server._heartbeats._on_grant = granted.append
    with watching(node, tls) as (lifelines, lost):
        lifelines.grant(Grant(epoch=3, attempt=2, silence_s=1.0, lease_s=1.0), 60.0)
        eventually(lambda: len(granted) > 5)
        assert granted[0].epoch == 3
        assert lost == []
        node.close()
        eventually(lambda: lost)


@pytest.mark.seconds
def test_a_lifeline_waits_for_records_that_arrive_in_pieces(shm: Path, tls: PeerTls) -> None:
    granted: list[Grant] = []
    node = Node.start(shm, "a", MESH, tls)
    node.server._heartbeats._on_grant = granted.append
    broken: list[str] = []
    with (
        contextlib.closing(FaultyLink(node.server.port, most_bytes=1)) as link,
        contextlib.closing(
            Lifelines(SECRET, lambda *_: None, 600.0, lambda _, why: broken.append(why), tls)
        ) as lifelines,
    ):
        lifelines.watch("there", "127.0.0.1", link.port)
        lifelines.grant(Grant(epoch=3, attempt=2, silence_s=1.0, lease_s=1.0), 60.0)
        eventually(lambda: len(granted) > 10)
        assert broken == []
    node.close()


@pytest.mark.seconds
def test_a_node_without_tls_is_told_to_set_it(node: Nodes, tls: PeerTls) -> None:
    there = node("a", tls=tls)
    said = "the peer uses TLS, but this node does not: set HOLDFAST_TLS_DIR on this node"
    assert said in refusal(there, None)
    assert said in exchange(SECRET, "127.0.0.1", there.server.port, 5.0)
    source, store = source_at(there.server.port, 1), node("b").store
    with pytest.raises(SourceLost, match=said):
        fetch(SECRET, source, 0, store, DEADLINE_S, timeouts=PATIENT)
    with watching(there, None) as (_, lost):
        eventually(lambda: lost)
        assert said in lost[0]


@pytest.mark.seconds
def test_a_node_with_tls_names_the_peer_that_lacks_it(node: Nodes, tls: PeerTls) -> None:
    there = node("a")
    said = "the peer does not use TLS, but this node does: set HOLDFAST_TLS_DIR on the peer's node"
    assert said in refusal(there, tls)
    with watching(there, tls) as (_, lost):
        eventually(lambda: lost)
        assert said in lost[0]


@pytest.mark.seconds
def test_a_peer_of_another_authority_is_refused(
    node: Nodes, tls: PeerTls, tmp_path: Path, theirs: CertificateAuthority
) -> None:
    there = node("a", tls=PeerTls(certified(tmp_path / "theirs", theirs)))
    said = "TLS: the peer's certificate is refused: .*; both need certificates of one authority"
    with pytest.raises(WireError, match=said):
        connected(there, tls)
    with watching(there, tls) as (_, lost):
        eventually(lambda: lost)
        assert "compare ca.crt in HOLDFAST_TLS_DIR of both nodes" in lost[0]


@pytest.mark.seconds
@pytest.mark.usefixtures("unrehearsed")
def test_a_server_refuses_a_client_of_another_authority(
    node: Nodes,
    tls: PeerTls,
    tmp_path: Path,
    ours: CertificateAuthority,
    theirs: CertificateAuthority,
) -> None:
    intruder = PeerTls(certified(tmp_path / "intruder", theirs, trusted=ours))
    there = node("a", tls=tls)
    said = "the peer refuses this node's certificate (unknown ca)"
    assert said in refusal(there, intruder)
    with watching(there, intruder) as (_, lost):
        eventually(lambda: lost)
        assert said in lost[0]


@pytest.mark.parametrize(
    ("own", "finished"),
    [(True, True), (False, True), (True, False)],
    ids=["certificate-of-its-own", "stolen-pair", "by-certificates-alone"],
)
def test_a_relay_changes_no_state(
    node: Nodes,
    tls: PeerTls,
    tmp_path: Path,
    ours: CertificateAuthority,
    monkeypatch: pytest.MonkeyPatch,
    own: bool,
    finished: bool,
) -> None:
    if not finished:
        monkeypatch.setattr(ssl.SSLSocket, "get_channel_binding", lambda *_: b"same")
    here, there = node("a", tls=tls), node("b", tls=tls)
    write(here.worker(0), attempt=1, step=5)
    third = PeerTls(certified(tmp_path / "third", ours)) if own else tls
    with (
        structlog.testing.capture_logs() as logs,
        relay(there.server.port, third) as port,
    ):
        here.replicator.set_partners(0, (Partner("b", "127.0.0.1", port),))
        here.replicator.offer(0, 1, 5)
        eventually(lambda: here.lost or here.replicated)
        here.replicator.close()
    assert there.store.held() == []
    assert "intercepted: a third party ends TLS between the two nodes" in here.lost[0][2]
    (logged,) = (line for line in logs if line["event"] == "cannot accept a connection")
    assert "a third party ends TLS between the two nodes" in logged["problem"]


@pytest.mark.seconds
def test_a_lifeline_through_a_relay_grants_nothing(
    shm: Path, tls: PeerTls, tmp_path: Path, ours: CertificateAuthority
) -> None:
    granted: list[Grant] = []
    there = Node.start(shm, "a", MESH, tls)
    there.server._heartbeats._on_grant = granted.append
    broken: list[str] = []
    with (
        relay(there.server.port, PeerTls(certified(tmp_path / "third", ours))) as port,
        contextlib.closing(
            Lifelines(SECRET, lambda *_: None, 600.0, lambda _, why: broken.append(why), tls)
        ) as lifelines,
    ):
        lifelines.watch("there", "127.0.0.1", port)
        lifelines.grant(Grant(epoch=3, attempt=2, silence_s=1.0, lease_s=1.0), 60.0)
        eventually(lambda: broken or granted)
    there.close()
    assert granted == []
    assert "intercepted: a third party ends TLS between the two nodes" in broken[0]


def test_a_peer_of_another_version_is_named() -> None:
    for opening in (b"HFTLS13\n", b"HFDATA9\n"):
        for expected in (True, False):
            with pytest.raises(WireError, match="the peer's Holdfast is of another version"):
                wire.check_opening(opening, tls=expected)


def test_a_client_without_a_certificate_receives_nothing(
    node: Nodes, tls: PeerTls, tmp_path: Path
) -> None:
    there = node("a", tls=tls)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(tmp_path / "ours" / AUTHORITY_FILE)
    with socket.create_connection(("127.0.0.1", there.server.port), DEADLINE_S) as plain:
        assert plain.recv(wire.OPENING_BYTES) == wire.TLS_OPENING
        with context.wrap_socket(plain) as sock, pytest.raises(ssl.SSLError, match="ALERT"):
            sock.recv(1)


@pytest.mark.usefixtures("unrehearsed")
def test_an_expired_certificate_is_named(
    node: Nodes, tls: PeerTls, tmp_path: Path, ours: CertificateAuthority
) -> None:
    expired = PeerTls(certified(tmp_path / "expired", ours, at=LONG_AGO))
    assert "certificate is refused: certificate has expired; replace tls.crt" in refusal(
        node("a", tls=expired), tls
    )
    assert "refuses this node's certificate (certificate expired); replace tls.crt" in refusal(
        node("b", tls=tls), expired
    )


def test_new_files_are_used_by_new_connections_only(
    node: Nodes, tmp_path: Path, ours: CertificateAuthority, theirs: CertificateAuthority
) -> None:
    folders = [certified(tmp_path / name, ours) for name in ("one", "two")]
    here, there = (node(name, tls=PeerTls(at)) for name, at in zip("ab", folders, strict=True))
    worker = here.worker(0)
    write(worker, 1, 1)
    here.replicator.set_partners(0, (there.partner,))
    here.replicator.offer(0, 1, 1)
    eventually(lambda: here.replicated == [(0, 1, 1)])
    (standing,) = there.server._connections

    for folder in folders:  # another authority altogether
        certified(folder, theirs)
    write(worker, 1, 2)
    here.replicator.offer(0, 1, 2)
    eventually(lambda: (0, 1, 2) in here.replicated)
    assert list(there.server._connections) == [standing]
    assert here.lost == []

    with connected(there, PeerTls(folders[0])) as sock:
        assert isinstance(sock, ssl.SSLSocket)
        served = ssl.DER_cert_to_PEM_cert(sock.getpeercert(binary_form=True) or b"")
        assert served.split() == (folders[1] / CERTIFICATE_FILE).read_text().split()


def test_half_replaced_files_are_not_used_yet(
    node: Nodes, tls: PeerTls, tmp_path: Path, ours: CertificateAuthority
) -> None:
    folder = tmp_path / "rotated"
    there = node("a", tls=PeerTls(certified(folder, ours)))
    connected(there, tls).close()
    certificate, key = issue(ours, datetime.now(UTC), ours.end)
    with structlog.testing.capture_logs() as logs:
        put(folder / KEY_FILE, key)
        for _ in range(3):
            connected(there, tls).close()
    assert [line["event"] for line in logs] == ["changed TLS files cannot be used yet"]
    put(folder / CERTIFICATE_FILE, certificate)
    with connected(there, tls) as sock:
        assert isinstance(sock, ssl.SSLSocket)
        served = ssl.DER_cert_to_PEM_cert(sock.getpeercert(binary_form=True) or b"")
    assert served.split() == certificate.split()


@pytest.mark.seconds
def test_a_silent_or_senseless_client_ends_by_a_deadline_and_disturbs_no_other(
    node: Nodes, tls: PeerTls
) -> None:
    there = node("a", tls=tls, timeouts=QUICK)
    with (
        socket.create_connection(("127.0.0.1", there.server.port), DEADLINE_S) as silent,
        socket.create_connection(("127.0.0.1", there.server.port), DEADLINE_S) as senseless,
    ):
        senseless.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
        wire.connect(SECRET, "127.0.0.1", there.server.port, Role.FETCH, PATIENT, tls=tls).close()
        for sock in (senseless, silent):
            with contextlib.suppress(ConnectionResetError):
                while sock.recv(1000):
                    pass
    eventually(lambda: not there.server._handshakes)


@pytest.mark.seconds
def test_a_silent_server_ends_by_a_deadline(tls: PeerTls) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        for opening in (b"", wire.TLS_OPENING):

            def serve(opening: bytes = opening) -> None:
                sock, _ = listener.accept()
                with sock:
                    sock.sendall(opening)
                    while sock.recv(1000):
                        pass

            thread = threading.Thread(target=serve)
            thread.start()
            with pytest.raises(TimeoutError):
                wire.connect(SECRET, "127.0.0.1", port, Role.PUSH, QUICK, tls=tls)
            thread.join(60)
            assert not thread.is_alive()


def test_a_connection_that_is_shut_down_sends_nothing_in_the_clear(
    node: Nodes, tls: PeerTls
) -> None:
    with connected(node("a", tls=tls), tls) as sock:
        assert isinstance(sock, ssl.SSLSocket)
        wire.shut(sock)
        assert sock.version() == "TLSv1.3"  # None: it would send and receive in the clear
        with pytest.raises(OSError):
            sock.send(b"state")


def test_an_idle_connection_is_not_stale(node: Nodes, tls: PeerTls) -> None:
    there = node("a", tls=tls)
    with connected(there, tls) as sock:
        assert not wire.is_stale(sock)
        there.server.close()
        eventually(lambda: wire.is_stale(sock))


def no_key(folder: Path) -> None:
    (folder / KEY_FILE).unlink()


def open_key(folder: Path) -> None:
    (folder / KEY_FILE).chmod(0o640)


def key_of_another(folder: Path) -> None:
    other = new_authority()
    put(folder / KEY_FILE, issue(other, datetime.now(UTC), other.end)[1])


def encrypted_key(folder: Path) -> None:
    key = serialization.load_pem_private_key((folder / KEY_FILE).read_bytes(), None)
    put(
        folder / KEY_FILE,
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"word"),
        ).decode(),
    )


def no_certificate(folder: Path) -> None:
    put(folder / CERTIFICATE_FILE, "not a certificate")


def expired_certificate(folder: Path) -> None:
    certified(folder, new_authority(), at=LONG_AGO)


def foreign_certificate(folder: Path) -> None:
    certified(folder, new_authority(), trusted=new_authority())


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (no_key, "cannot be read .No such file.*: it needs the files ca.crt, tls.crt and tls.key"),
        (open_key, "tls.key is refused: other users can read it: chmod 600"),
        (key_of_another, "the certificate's own tls.key"),
        (encrypted_key, "tls.key, not encrypted, in PEM"),
        (no_certificate, "HOLDFAST_TLS_DIR=.* it needs ca.crt, tls.crt and"),
        (expired_certificate, "tls.crt is unusable with .*ca.crt: certificate has expired"),
        (foreign_certificate, "tls.crt is unusable with .*ca.crt: .*replace the certificate"),
    ],
)
def test_unusable_files_are_refused(
    tls: PeerTls, tmp_path: Path, spoil: Callable[[Path], None], why: str
) -> None:
    assert 364 < (tls.check() - time.time()) / 86400 < 365
    spoil(tmp_path / "ours")
    with pytest.raises(TlsUnusable, match=why):
        tls.check()
