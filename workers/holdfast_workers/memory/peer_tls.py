"""TLS of the connections between nodes: data channel and lifelines.

A node that uses TLS has a folder, named by `HOLDFAST_TLS_DIR`, with the files of a certificate
secret of Kubernetes: `ca.crt`, the authorities that a peer's certificate must come from; `tls.crt`
and `tls.key`, the node's own certificate and its key. Both sides show their certificate. It proves
that a machine belongs to the installation, not which one it is: names are not compared, because
nodes come and go by address, and the job's secret is proved inside the connection. That proof names
the session (`session_of`): a third party with a certificate of its own, or even a copy of a node's
pair, has one session with each node, and cannot pass a proof of one on as a proof of the other.

TLS 1.3 only. Files that change are used from the next connection on; connections that stand keep
theirs. If the new files cannot be used, perhaps because only some are replaced yet, the former ones
stay in use and the problem is logged once.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import math
import socket
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import structlog

from holdfast_workers.errors import WorkersError
from holdfast_workers.private_files import PrivateFileRefused, read_private

TLS_VARIABLE = "HOLDFAST_TLS_DIR"
"""Environment variable of a node: its folder with certificates; not set: no TLS."""
AUTHORITY_FILE, CERTIFICATE_FILE, KEY_FILE = "ca.crt", "tls.crt", "tls.key"

REFUSED_S = 5.0
"""How long changed files that cannot be used are not read again, unless they change once more."""

_log = structlog.get_logger()


class TlsUnusable(WorkersError):
    """The files of the folder cannot be used; says which and what to do."""


Stamp = tuple[tuple[int, int, int] | None, ...]


class _PeerContext(ssl.SSLContext):
    """Keeps what `ssl` tells of no connection: the certificate that this side shows, in DER."""

    shown: bytes | None = None


@dataclass(frozen=True)
class _Contexts:
    stamp: Stamp
    """The state of the files when these settings were made."""
    client: _PeerContext
    server: _PeerContext
    expires_at: float


class PeerTls:
    """The certificates of one node. Thread-safe."""

    def __init__(self, folder: Path) -> None:
        """Reads nothing: the first connection does, or `check`."""
        self._folder = folder
        self._loaded: _Contexts | None = None
        self._refused: Stamp = ()
        self._refused_at = 0.0

    def check(self) -> float:
        """The time at which the certificate or its authority expires, in Unix seconds. Raises
        TlsUnusable if these files cannot make a connection, also if the certificate has expired or
        is not of the folder's own authority."""
        return _load(self._folder).expires_at

    def client(self, sock: socket.socket) -> ssl.SSLSocket:
        """The connecting side of TLS over `sock`, which it replaces. The handshake is still to be
        done. Raises TlsUnusable."""
        context = self._current().client
        return context.wrap_socket(sock, do_handshake_on_connect=False)

    def server(self, sock: socket.socket) -> ssl.SSLSocket:
        """Wrap the socket of the accepting side in TLS."""
        context = self._current().server
        return context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)

    def _current(self) -> _Contexts:
        # Two threads may load the same change: harmless, and no lock is held while files are read.
        loaded, stamp = self._loaded, _stamp(self._folder)
        if loaded is not None and loaded.stamp == stamp:
            return loaded
        was_refused = stamp == self._refused
        if loaded is not None and was_refused and time.monotonic() < self._refused_at + REFUSED_S:
            return loaded
        try:
            self._loaded = loaded = _load(self._folder)
        except TlsUnusable as error:
            if loaded is None:
                raise
            self._refused, self._refused_at = stamp, time.monotonic()
            if not was_refused:
                _log.warning("changed TLS files cannot be used yet", problem=str(error))
        return loaded


def peer_tls(folder: str) -> PeerTls | None:
    """The TLS of a node with this setting; None for ""."""
    return PeerTls(Path(folder)) if folder else None


def session_of(sock: socket.socket) -> str:
    """A text that both ends of a connection see of its session of TLS, and that no other session
    has: the hashes of both certificates, and the end of the handshake that agreed on its keys. ""
    without TLS. Raises OSError unless the handshake is done."""
    if not isinstance(sock, ssl.SSLSocket):
        return ""
    assert isinstance(sock.context, _PeerContext)
    certificates = [sock.context.shown, sock.getpeercert(binary_form=True)]
    if sock.server_side:
        certificates.reverse()  # the client's first
    # `ssl` names it as TLS 1.2 did. In TLS 1.3 it is the client's Finished: a MAC over everything
    # before it, both key shares included. No session is resumed, so each has its own.
    finished = sock.get_channel_binding("tls-unique")
    seen = hashlib.sha256()
    for part in (*certificates, finished):
        if not part:
            raise OSError(errno.EPROTO, "TLS: the handshake is not done")
        seen.update(hashlib.sha256(part).digest())
    return seen.hexdigest()


def explain(error: ssl.SSLError) -> str:
    """A failed handshake in words: who refuses whose certificate, and what to do."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"TLS: the peer's certificate is refused: {error.verify_message}; {_remedy(error)}"
    reason = error.reason or ""
    if "ALERT" in reason:
        alert = reason.partition("ALERT_")[2].replace("_", " ").lower()
        return (
            f"TLS: the peer refuses this node's certificate ({alert}); replace {CERTIFICATE_FILE} "
            f"and {KEY_FILE} in {TLS_VARIABLE} of this node, or compare {AUTHORITY_FILE} of both"
        )
    if isinstance(error, ssl.SSLEOFError):
        return "TLS: the peer closed the connection during the handshake; see its log"
    return f"TLS: {error}"


def _remedy(error: ssl.SSLCertVerificationError) -> str:
    if error.verify_code in _DATES:
        return (
            f"replace {CERTIFICATE_FILE} and {KEY_FILE} in the peer's {TLS_VARIABLE}, or set the "
            "clock that is wrong"
        )
    return (
        f"both need certificates of one authority, for servers and clients: compare "
        f"{AUTHORITY_FILE} in {TLS_VARIABLE} of both nodes"
    )


_DATES = (9, 10)
"""Codes of OpenSSL: not valid yet, expired."""


def _stamp(folder: Path) -> Stamp:
    return tuple(_stamp_of(folder / name) for name in (AUTHORITY_FILE, CERTIFICATE_FILE, KEY_FILE))


def _stamp_of(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def _load(folder: Path) -> _Contexts:
    stamp = _stamp(folder)
    try:
        read_private(folder / KEY_FILE)
        client = _context(ssl.PROTOCOL_TLS_CLIENT, folder)
        server = _context(ssl.PROTOCOL_TLS_SERVER, folder)
        server.num_tickets = 0  # no session is resumed: each connection shows certificates
        expires_at = _rehearse(client, server)
    except PrivateFileRefused as error:
        raise TlsUnusable(str(error)) from error
    except ssl.SSLCertVerificationError as error:
        raise TlsUnusable(
            f"{folder / CERTIFICATE_FILE} is unusable with {folder / AUTHORITY_FILE}: "
            f"{error.verify_message}; replace the certificate and its key, or the authority"
        ) from error
    except ssl.SSLError as error:
        raise TlsUnusable(
            f"{TLS_VARIABLE}={folder}: {error}; it needs {AUTHORITY_FILE}, {CERTIFICATE_FILE} and "
            f"the certificate's own {KEY_FILE}, not encrypted, in PEM"
        ) from error
    except OSError as error:
        raise TlsUnusable(
            f"{TLS_VARIABLE}={folder} cannot be read ({error.strerror}): it needs the files "
            f"{AUTHORITY_FILE}, {CERTIFICATE_FILE} and {KEY_FILE}, readable by this user"
        ) from error
    return _Contexts(stamp, client, server, expires_at)


def _context(protocol: int, folder: Path) -> _PeerContext:
    context = _PeerContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(folder / AUTHORITY_FILE)
    # With a password, an encrypted key is an error instead of a question on the terminal.
    context.load_cert_chain(folder / CERTIFICATE_FILE, folder / KEY_FILE, password="")
    return context


def _rehearse(client: _PeerContext, server: _PeerContext) -> float:
    """A handshake of the node with itself, in memory: when its certificate expires, or that of its
    authority. Records the certificates that were shown. Raises ssl.SSLError."""
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = (
        client.wrap_bio(to_client, to_server),
        server.wrap_bio(to_server, to_client, server_side=True),
    )
    for _ in range(2):
        for side in sides:
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()
    server.shown, client.shown = (side.getpeercert(binary_form=True) for side in sides)
    shown = sides[0].getpeercert()
    assert shown is not None  # both sides are connected
    issuers = [each for each in client.get_ca_certs() if each["subject"] == shown["issuer"]]
    return min(_end(shown), max(map(_end, issuers), default=math.inf))


def _end(certificate: Mapping[str, object]) -> float:
    return float(ssl.cert_time_to_seconds(str(certificate["notAfter"])))
